# SPDX-License-Identifier: Apache-2.0
"""Callables that workers of load tests run; `BurstableExecutor` gets them by dotted name.

They are not operations of the product: only executors of load tests run them. `worker_path()` lets
their workers find this module.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Progress = Callable[[Json], None]


def worker_path() -> None:
    """Let the zygote of this process import `load_tests`."""
    root = str(Path(__file__).parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])


def moment(_payload: Json, _request_id: str, _home: str, _progress: Progress) -> float:
    return time.time()
