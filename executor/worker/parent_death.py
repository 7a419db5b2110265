# SPDX-License-Identifier: Apache-2.0
"""Ends a worker when its daemon exits: the death pipe, which is never written.

The daemon holds the writing end; when that closes, the daemon has exited.
A worker that waits for a task sees its own pipe end. A busy one does not look, may be stuck in C
code, and may have children. So the *kernel* is asked to act: the worker opens the pipe anew
(an open file description of its own), makes its process group the owner and SIGKILL the signal of
that file. When the last writer closes, which the death of the daemon does, the whole group gets it
(fcntl(2), F_SETOWN and F_SETSIG).

PR_SET_PDEATHSIG would not do: the parent of a worker is the zygote, whose exit must harm no task,
and it covers neither the worker's children nor a parent whose *thread* ended.

Elsewhere than on Linux a thread waits for the end of the pipe.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading

_F_SETSIG = 10  # not in the fcntl module; asm-generic/fcntl.h

HAS_PARENT_DEATH_SIGNAL = sys.platform == "linux"


def arm_parent_death_signal(descriptor: int) -> None:
    """End this process group by SIGKILL when the writing end closes, or has closed already.

    Call it as the leader of the group. Consumes `descriptor`.
    """
    if HAS_PARENT_DEATH_SIGNAL:
        _ask_kernel(descriptor)
    else:
        threading.Thread(target=_wait_for_end, args=(descriptor,), daemon=True).start()


def _ask_kernel(descriptor: int) -> None:
    # Anew, because owner and signal belong to the open file description, which forks share.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    own = os.open(f"/proc/self/fd/{descriptor}", flags)
    os.close(descriptor)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, flags | os.O_ASYNC)
    # It may have ended before the kernel was asked.
    poll = select.poll()
    poll.register(own, 0)
    if poll.poll(0):
        _kill_group()


def _wait_for_end(descriptor: int) -> None:
    os.read(descriptor, 1)
    _kill_group()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
