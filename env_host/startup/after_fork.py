# SPDX-License-Identifier: Apache-2.0
"""What a forked process does before it is a shard: forget the host, and die with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from ..ipc.fd_messages import close_all

HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)  # while forking
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NAME = 15
_NAME_BYTES = 15  # the kernel keeps no more

_libc = ctypes.CDLL(None, use_errno=True)  # here: after a fork is no time to load a library


def fork() -> int:
    """Fork; in the child no signal has been missed, and the host's handlers are gone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in HELD_BACK:
                signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle_in(parent: int, name: str, to_close: Iterable[int]) -> None:
    """Die with the parent, close what is its alone, have a name and other random numbers."""
    die_with(parent)
    close_all(list(to_close))
    set_name(name)
    reseed()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` has died."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)


def set_name(name: str) -> None:
    """What `top` and `ps` call this process."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def reseed() -> None:
    """Python's own generator does so by itself; others would repeat in every shard."""
    for name in ("numpy.random", "torch.random"):
        module: Any = sys.modules.get(name)
        for function in ("seed",):
            if callable(found := getattr(module, function, None)):
                found()
