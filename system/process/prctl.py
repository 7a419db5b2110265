# SPDX-License-Identifier: Apache-2.0
"""Calls of prctl(2): a process's parent-death signal, adoption of orphans, and name.

The C library is loaded on import, because it should not be loaded after a fork. Elsewhere than on
Linux these functions do nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_NAME_BYTES = 15  # the kernel keeps no more

_libc = ctypes.CDLL(None, use_errno=True)
_F_SETSIG = 10  # of Linux's `fcntl`


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when `parent`, which forked it, has died.

    For the kernel, the parent has died as soon as the thread that forked this process has ended.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(127)  # the parent died before the line above took effect


def adopt_orphans(wanted: bool = True) -> None:
    """Make orphans below this process its children rather than init's (a "subreaper")."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def set_thread_name(name: str) -> None:
    """Set what `top` and `ps -o comm` show of this thread, or of the process if it is its first."""
    _prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES])


def die_with_writer(fd: int, owner: int = 0) -> int:
    """Have the kernel kill this process when the last writing end of a pipe is closed. On Linux.

    `fd` is a reading end, whose settings other processes share; returns one of this process alone.
    `owner` is whom to kill instead of this process: as of F_SETOWN, a negative number is a group.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETOWN, owner or os.getpid())
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)  # last: it takes effect now
    return own


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)
