# SPDX-License-Identifier: Apache-2.0
"""What the load tests have workers do: callables for `BurstableExecutor`, by dotted name.

None of them is an operation of the product: only an executor that a load test makes itself runs
them. `worker_path()` lets its workers find this module.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Progress = Callable[[Json], None]

FOREVER_SECONDS = 3600.0
PAGE_BYTES = 4096


def worker_path() -> None:
    """Let the zygote of this process import `load_tests`."""
    root = str(Path(__file__).parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])


def moment(_payload: Json, _request_id: str, _home: str, _progress: Progress) -> float:
    """When it started."""
    return time.time()


def hold(payload: Json, _request_id: str, _home: str, progress: Progress) -> float:
    """Hold `bytes` of touched memory for `seconds`."""
    started = time.time()
    held = touched(payload["bytes"])
    progress({"holding": len(held)})
    time.sleep(payload.get("seconds", FOREVER_SECONDS))
    return started


def hold_below(payload: Json, _request_id: str, _home: str, progress: Progress) -> None:
    """Have a child hold `bytes`; a child that is killed fails the operation."""
    script = f"import time; held = bytearray(b'1' * {payload['bytes']}); time.sleep(60)"
    progress({"holding": payload["bytes"]})
    subprocess.run([sys.executable, "-c", script], check=True)


def raise_memory_error(_payload: Json, _request_id: str, _home: str, _progress: Progress) -> None:
    """As an allocation that the system refuses."""
    raise MemoryError


def hang(_payload: Json, _request_id: str, _home: str, progress: Progress) -> None:
    """Until it is told to stop."""
    progress({"pid": os.getpid()})
    time.sleep(FOREVER_SECONDS)


def exit_at_once(payload: Json, _request_id: str, _home: str, _progress: Progress) -> None:
    """With `code`, past every handler."""
    os._exit(payload["code"])


def segfault(_payload: Json, _request_id: str, _home: str, _progress: Progress) -> None:
    """Read where nothing is mapped."""
    ctypes.string_at(0)


def touched(size_bytes: int) -> bytearray:
    """Memory that is really there: every page written."""
    held = bytearray(size_bytes)
    held[::PAGE_BYTES] = b"1" * len(range(0, size_bytes, PAGE_BYTES))
    return held
