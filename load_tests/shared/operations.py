# SPDX-License-Identifier: Apache-2.0
"""What the load tests have workers do: callables for `BurstableExecutor`, by dotted name.

None of them is an operation of the product: only an executor that a load test makes itself runs
them. `worker_path()` lets its workers find this module.
"""

from __future__ import annotations

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
