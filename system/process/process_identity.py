# SPDX-License-Identifier: Apache-2.0
"""Identifies a process by pid *and* start time, so that a reused pid never matches; or by its lock.

`started_at` is the kernel's own figure (field 22 of `/proc/<pid>/stat`, in seconds since boot),
not the wall clock's: it survives clock steps, such as the first synchronization of a laptop. The
number also contains 2**30 times a 16-bit tag of the boot id, so that a value written before a
reboot never matches after it. Such numbers can only be compared for equality. On other systems than
Linux, psutil has the start time (`macos.py`).

A process may hold the lock of a file (`flock`) for as long as it lives, and `is_locked` tries to
take it. The try holds a shared lock for a moment, so that two tries at once do not mistake each
other for the holder. Call it only where no process takes the lock without waiting. Light: a shim
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
# 2**30 seconds are 34 years of uptime. With 16 bits above them, a double still resolves 1/128 s,
# which is finer than a tick.
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
        """Return the process whose `stat` was read."""
        return cls(stat.pid, _boot_tag() + stat.started_seconds)

    def exists(self) -> bool:
        """Return whether the pid is still this process's; a zombie counts."""
        return _started_at(self.pid) == self.started_at

    def is_alive(self) -> bool:
        """Return whether the process runs. A zombie does not: it only waits to be reaped."""
        if not IS_LINUX:
            from . import macos

            return self.exists() and not macos.is_zombie(self.pid)
        stat = read_stat(self.pid)
        return stat is not None and not stat.is_dead and self == ProcessIdentity.of_stat(stat)

    def open_pidfd(self) -> int | None:
        """Open a pidfd of exactly this process (the caller closes it); None when it is gone.

        The identity is checked *after* opening: the descriptor then refers to the process, even if
        its number is reused. Raises `OSError` if the system has no pidfds, or no descriptors are
        left.
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
        """Send a signal; False if the process is gone, or another one has its pid.

        Raises `PermissionError` when the process belongs to another user.
        """
        if not hasattr(os, "pidfd_open"):  # the process may end between check and signal
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
    """Return the seconds of this boot, which a clock step does not change.

    Numbers of one boot differ by seconds, numbers of different boots by years.
    """
    return _boot_tag() + time.monotonic()


@cache
def _boot_tag() -> float:
    # In a sandbox without a boot id, only start times are compared.
    return int((read_text(_BOOT_ID_PATH) or "0")[:4], 16) * _BOOT_TAG_UNIT


def _started_at(pid: int) -> float | None:
    if not IS_LINUX:
        from . import macos

        return macos.started_at(pid)
    stat = read_stat(pid)
    return None if stat is None else _boot_tag() + stat.started_seconds


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether another process holds the lock of a file; False if there is no file.

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
