# SPDX-License-Identifier: Apache-2.0
"""The first zygote of a daemon, forked from the daemon before it becomes one.

    one thread, no descriptors but its own, nothing imported but what operations need
        │
        ├─ fork ─▶ zygote: its own session, `home`, quiet standard descriptors; forks workers
        │
        └─ goes on: HTTP, database, threads; never forks again

Daemon and zygote then share the pages of everything imported before, which is most of what a zygote
is; and the zygote is ready before the daemon is. A zygote that dies later is replaced by a fresh
program (`zygote_link.py`). A daemon that does not come to life closes its end of the control socket
by ending, which ends this zygote too.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ...system.after_fork import close_all_but
from .source import threads_of_this_process, worker_environment
from .zygote import become_zygote, preload


@dataclass(frozen=True, slots=True)
class FirstZygote:
    """A zygote that nobody has spoken to yet, and the lifeline that its workers will hold."""

    pid: int
    control: socket.socket
    lifeline: tuple[int, int]  # the reading end, which workers hold, and ours, never written


def fork_first_zygote(modules: Sequence[str], home: str) -> FirstZygote | None:
    """Import `modules`, then fork; None when there are threads by then, whoever started them.

    Raises:
        OSError: the system will not fork.
    """
    began = time.monotonic()
    gc.disable()  # what imports make is there to stay: nothing to collect, much to look through
    preload(list(modules))
    gc.freeze()
    if threads_of_this_process() > 1:
        return None
    ours, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(ours, zygotes, lifeline, home, began)
    zygotes.close()
    return FirstZygote(pid, ours, lifeline)


def _live(
    daemons: socket.socket,
    control: socket.socket,
    lifeline: tuple[int, int],
    home: str,
    began: float,
) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C at `up --foreground` is the daemon's to handle
        daemons.close()
        os.close(lifeline[1])
        _quieten(keep={control.fileno(), lifeline[0]})
        os.environ.update(worker_environment(os.environ))
        os.chdir(home)
        become_zygote(control, lifeline=lifeline[0], home=home, began=began)
    finally:
        # Never back into what was to become a daemon, whatever happened.
        os._exit(70)


def _quieten(keep: set[int]) -> None:
    """Standard input and output to nowhere, errors to the daemon's log, and nothing else open."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    close_all_but(keep)
    sys.stdout.flush()  # to nowhere: no worker is to print what the daemon began
