# SPDX-License-Identifier: Apache-2.0
"""Facts that Linux has in `/proc` and macOS gives through psutil. Not called on Linux.

psutil is imported at its first use, since the CLI does not need it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from .proc import ProcessStat
from .process_identity import ProcessIdentity

Fact = TypeVar("Fact")
_ZOMBIE = "zombie"  # psutil.STATUS_ZOMBIE


def started_at(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None if it does not exist."""
    return _fact_of(pid, lambda process: float(process.create_time()), None)


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, but has not been reaped yet."""
    return _fact_of(pid, lambda process: bool(process.status() == _ZOMBIE), True)


def all_stats() -> Iterator[ProcessStat]:
    """Yield every process; on macOS, `started_seconds` counts from the epoch."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            state = "Z" if process.status() == _ZOMBIE else "S"
            yield ProcessStat(
                process.pid,
                process.name(),
                state,
                process.ppid(),
                os.getpgid(process.pid),
                os.getsid(process.pid),
                process.create_time(),
            )


def wait_until_dead(members: Iterable[ProcessIdentity], timeout_seconds: float) -> bool:
    """Wait until all members have ended; return False if the time ran out first."""
    import psutil

    processes = []
    for member in members:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(member.pid)
            if process.create_time() == member.started_at:
                processes.append(process)
    _, alive = psutil.wait_procs(processes, timeout=timeout_seconds)
    return not alive


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory; 0 if the process has ended."""
    return _fact_of(pid, lambda process: int(process.memory_info().rss), 0)


def descendants_of(pid: int) -> set[int]:
    """Return the pids of everything below a process."""
    return _fact_of(pid, lambda process: {child.pid for child in process.children(True)}, set())


def _fact_of(pid: int, read: Callable[[Any], Fact], otherwise: Fact) -> Fact:
    import psutil

    try:
        return read(psutil.Process(pid))
    except psutil.Error:
        return otherwise


def machine_memory_bytes() -> tuple[int, int]:
    """Return the machine's memory, and how much of it is available."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)
