# SPDX-License-Identifier: Apache-2.0
"""What a `ProcessPoolExecutor` does where ours is put to the test.

    holders      requests that hold memory, a worker each (`low_resources.py`, inside a cgroup)
    one_death    what becomes of a neighbour and of the next task (`oom_matrix.py`)
    behind_long  how long a SHORT task waits behind a full house of LONG ones (`full_house.py`)

SkyPilot's workers run in such pools. Workers are spawned, as its are.

    python -m load_tests.peers.pool_peer COUNT MB     `holders`, as one line of JSON
    python -m load_tests.peers.pool_peer DEATH        `one_death`, as one line of JSON

Pools are made in a process of their own, because `multiprocessing` starts a resource tracker in
each process that makes one, which stays as its child until that process exits.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.shared.operations import FOREVER_SECONDS, touched

POOL = "ProcessPoolExecutor"  # what it is called in tables
MB = 2**20
HOLD_SECONDS = 3.0
PATIENCE_SECONDS = 120.0

_spawn = multiprocessing.get_context("spawn")
_now: Any = None  # in a worker: how many hold memory at this moment, and the most so far
_most: Any = None


def main() -> None:
    """Run one measurement, and print it as JSON."""
    if sys.argv[1] in DEATHS:
        print(json.dumps(asdict(_one_death(DEATHS[sys.argv[1]]))))
    else:
        print(json.dumps(holders(int(sys.argv[1]), int(sys.argv[2]))))


def holders(count: int, size_mb: int) -> dict[str, int]:
    """All at once, a worker each."""
    now, most = _spawn.Value("i", 0), _spawn.Value("i", 0)
    with ProcessPoolExecutor(count, _spawn, _share, (now, most)) as pool:
        futures = [pool.submit(_hold, size_mb * MB) for _ in range(count)]
        succeeded = sum(_ends_well(future) for future in futures)
    return {"at_once": most.value, "succeeded": succeeded}


def _share(now: Any, most: Any) -> None:
    global _now, _most
    _now, _most = now, most


def _hold(size_bytes: int) -> int:
    held = touched(size_bytes)
    with _now.get_lock():
        _now.value += 1
        _most.value = max(_most.value, _now.value)
    time.sleep(HOLD_SECONDS)
    with _now.get_lock():
        _now.value -= 1
    return len(held)


@dataclass(frozen=True)
class PoolDeath:
    """What one death did in a pool."""

    neighbour_unharmed: bool
    next_runs: bool
    said: str  # of the victim

    @property
    def names_its_cause(self) -> bool:
        """More than that some process died somehow."""
        return not self.said.startswith("BrokenProcessPool")


def kill_by_hand() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def exit_code() -> None:
    os._exit(7)


def raise_memory_error() -> None:
    raise MemoryError


DEATHS: dict[str, Callable[[], None]] = {
    "kill -9": kill_by_hand,  # and so does the kernel, when memory is out
    "segmentation fault": segfault,
    "exit code": exit_code,
    "MemoryError": raise_memory_error,
}


def one_death(name: str) -> PoolDeath:
    """Let one worker of a pool die of one of `DEATHS`."""
    command = [sys.executable, "-m", "load_tests.peers.pool_peer", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return PoolDeath(**json.loads(done.stdout))


def _one_death(die: Callable[[], None]) -> PoolDeath:
    """In a pool of two: a neighbour at work, the victim, and a task after it."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(2, context)
    neighbour = pool.submit(time.sleep, FOREVER_SECONDS)
    pool.submit(time.time).result(PATIENCE_SECONDS)  # both workers are there
    try:
        error = pool.submit(die).exception(PATIENCE_SECONDS)
        next_runs = _next_runs(pool)
        return PoolDeath(not neighbour.done(), next_runs, f"{type(error).__name__}: {error}")
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown()


def _next_runs(pool: ProcessPoolExecutor) -> bool:
    with suppress(Exception):
        return _ends_well(pool.submit(time.time))
    return False


def _ends_well(future: Future[Any]) -> bool:
    return future.exception(PATIENCE_SECONDS) is None


def behind_long(workers: int, house: int, long_seconds: float) -> float:
    """How many seconds a SHORT task takes that is submitted after `house` LONG ones."""
    with ProcessPoolExecutor(workers, _spawn) as pool:
        list(pool.map(time.sleep, [0.1] * workers))  # they are all there
        for _ in range(house):
            pool.submit(time.sleep, long_seconds)
        began = time.monotonic()
        pool.submit(time.time).result(PATIENCE_SECONDS)
        return time.monotonic() - began


if __name__ == "__main__":
    main()
