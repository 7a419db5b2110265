# SPDX-License-Identifier: Apache-2.0
"""A worker's process: its end with the daemon's, and its output in the log of its task.

The death pipe is never written. The daemon holds the writing end; when that closes, the daemon has
exited. A worker that waits for a task sees its own pipe end. A busy one does not look, may be stuck
in C code, and may have children. So the *kernel* is asked to act: the worker opens the pipe again
(an open file description of its own), makes its process group the owner and SIGKILL the signal of
that file. When the last writer closes, which the death of the daemon does, the whole group gets it
(fcntl(2), F_SETOWN and F_SETSIG).

PR_SET_PDEATHSIG would not do: the parent of a worker is the zygote, whose exit must harm no task,
and it covers neither the worker's children nor a parent whose *thread* ended.

Elsewhere than on Linux a thread waits for the end of the pipe.

A task's output is directed into its log by file descriptor, so that it survives any exit. The log
is there from the task's start, and is removed at its end if nothing is in it: most SHORT tasks
print nothing. A later attempt appends to what an earlier one has printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import threading
from pathlib import Path

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
    # Again, because owner and signal belong to the open file description, which forks share.
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


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def begin_log(path: str) -> None:
    """Point stdout and stderr at the end of the log; at nothing when it cannot be opened."""
    try:
        log = os.open(path, _FLAGS, 0o600)
    except OSError:  # a full disk must not fail a task that may be able to do without
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if log > 2:  # an operation may have closed 1 or 2, so that the log was opened as one of them
        os.close(log)
    # New streams each time: an operation may have closed those of its process.
    sys.stdout, sys.stderr = (
        open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def end_log(path: str) -> None:
    """Flush: what the task printed is in its log when this returns."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError):
        if not Path(path).stat().st_size:
            Path(path).unlink()
