# SPDX-License-Identifier: Apache-2.0
"""Facts that Linux has in `/proc` and macOS gives through psutil. Not called on Linux.

psutil is imported at its first use, since the CLI does not need it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from .proc import ProcessStat
from .process_identity import ProcessIdentity


def started_at(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None if it does not exist."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, but has not been reaped yet."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def all_stats() -> Iterator[ProcessStat]:
    """Yield every process; on macOS, `started_seconds` counts from the epoch."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "S"
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
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def descendants_of(pid: int) -> set[int]:
    """Return the pids of everything below a process."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return set()


def machine_memory_bytes() -> tuple[int, int]:
    """Return the machine's memory, and how much of it is available."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)
