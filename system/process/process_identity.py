# SPDX-License-Identifier: Apache-2.0
"""A process by pid *and* start time, so that no reused pid is taken for it; or by a lock it holds.

`started_at` is the kernel's own figure (field 22 of `/proc/<pid>/stat`, in seconds since boot),
not the wall clock's: it survives clock steps, such as the one when a laptop first meets its time
server. To it is added 2**30 times a 16-bit tag of the boot id, so that a value written before a
reboot never matches after it. Two such numbers are compared for equality and mean nothing else.
Elsewhere than on Linux, psutil knows (`macos.py`).

A process may hold the lock of a file (`flock`) for as long as it lives: `is_locked` tries it. The
try is itself a short hold: shared, so that two that ask at once do not take each other for the
holder. It must not get into the way of one that takes the lock without waiting. Light: a shim
imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from functools import cache
from typing import NamedTuple

from ..memory.cgroup_tree import read_text
from .proc import ProcessStat, read_stat

IS_LINUX = sys.platform == "linux"

_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
# 2**30 seconds are 34 years of uptime; 16 bits above them still leave a double a resolution of
# 1/128 s, finer than a tick.
_BOOT_TAG_UNIT = float(2**30)


class ProcessIdentity(NamedTuple):
    """One process, never another one that got its pid later."""

    pid: int
    started_at: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the process, or zombie, of this pid; raises `ProcessLookupError` for none."""
        started_at = _started_at(pid)
        if started_at is None:
            raise ProcessLookupError(f"no process has pid {pid}")
        return cls(pid, started_at)

    @classmethod
    def of_stat(cls, stat: ProcessStat) -> ProcessIdentity:
        """Return the process that `stat` was read from."""
        return cls(stat.pid, _boot_tag() + stat.started_seconds)

    def exists(self) -> bool:
        """Return whether the pid is still this process's, if only as a zombie."""
        return _started_at(self.pid) == self.started_at

    def is_alive(self) -> bool:
        """Return whether it runs. A zombie does not: it waits to be reaped and holds nothing."""
        if not IS_LINUX:
            from . import macos

            return self.exists() and not macos.is_zombie(self.pid)
        stat = read_stat(self.pid)
        return stat is not None and not stat.is_dead and self == ProcessIdentity.of_stat(stat)

    def open_pidfd(self) -> int | None:
        """Open a pidfd of exactly this process (the caller closes it); None when it is gone.

        The identity is checked *after* opening: from then on the descriptor is tied to the process,
        whatever becomes of the number. Raises `OSError` when the system has no pidfds, or no
        descriptors are left.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.exists():
            return fd
        os.close(fd)
        return None

    def signal(self, number: int) -> bool:
        """Send a signal; False when the process is gone (or its pid another's).

        Raises `PermissionError` when the process belongs to another user.
        """
        if not hasattr(os, "pidfd_open"):  # check and signal are two steps: a window remains
            with contextlib.suppress(ProcessLookupError):
                if self.is_alive():
                    os.kill(self.pid, number)
                    return True
            return False
        fd = self.open_pidfd()
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def boot_seconds() -> float:
    """Return the seconds of this boot; a clock step does not move them.

    Two such numbers are seconds apart when they are of one boot, and years otherwise.
    """
    return _boot_tag() + time.monotonic()


@cache
def _boot_tag() -> float:
    # Where a sandbox has no boot id, start times alone must do.
    return int((read_text(_BOOT_ID_PATH) or "0")[:4], 16) * _BOOT_TAG_UNIT


def _started_at(pid: int) -> float | None:
    if not IS_LINUX:
        from . import macos

        return macos.started_at(pid)
    stat = read_stat(pid)
    return None if stat is None else _boot_tag() + stat.started_seconds


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether another process holds the lock of a file; not where there is no file.

    Raises `OSError`: the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
