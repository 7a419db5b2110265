# SPDX-License-Identifier: Apache-2.0
"""Facts that Linux has in `/proc` and macOS gives through psutil. Not called on Linux.

psutil is imported when it is needed first, since the CLI has no use for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from .proc import ProcessStat
from .process_identity import ProcessIdentity


def started_at(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None when there is none."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, and waits to be reaped."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def all_stats() -> Iterator[ProcessStat]:
    """Return every process; `started_seconds` is since the epoch here."""
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
    """Wait until all have ended; False when time ran out first."""
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
    """Return what is resident of a process; 0 when it is gone."""
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
    """Return the machine's memory, and what of it is available."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)
