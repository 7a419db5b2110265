# SPDX-License-Identifier: Apache-2.0
"""Forks the first zygote of a daemon, while the daemon has one thread and little memory.

    one thread, no descriptors but its own, nothing imported but what operations need
        │
        ├─ fork ─▶ zygote: its own session, `home`, quiet standard descriptors; forks workers
        │
        └─ goes on: HTTP, database, threads; never forks again

Daemon and zygote then share the pages of everything imported before, which is most of what a zygote
is; and the zygote is ready before the daemon is. A zygote that exits later is replaced by a fresh
program (`zygote_client.py`). A daemon that fails to start closes its end of the control
socket by exiting, which ends this zygote too.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ...system.forking import close_all_but, preload, thread_count
from .source import worker_environment
from .zygote import become_zygote


@dataclass(frozen=True, slots=True)
class PreforkedZygote:
    """A zygote that has not been used yet, and the death pipe that its workers will hold."""

    pid: int
    control: socket.socket
    death_pipe: tuple[int, int]  # the reading end, which workers hold, and ours, never written


def prefork_zygote(modules: Sequence[str], home: str) -> PreforkedZygote | None:
    """Import `modules`, then fork; None when there are threads by then.

    Raises:
        OSError: the system will not fork.
    """
    began = time.monotonic()
    preload(modules, collect=False)  # the daemon is being waited for
    if thread_count() > 1:
        return None
    ours, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    death_pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_zygote(ours, zygotes, death_pipe, home, began)
    zygotes.close()
    return PreforkedZygote(pid, ours, death_pipe)


def _run_zygote(
    daemons: socket.socket,
    control: socket.socket,
    death_pipe: tuple[int, int],
    home: str,
    began: float,
) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C at `up --foreground` is the daemon's to handle
        daemons.close()
        os.close(death_pipe[1])
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        close_all_but({control.fileno(), death_pipe[0]})
        sys.stdout.flush()  # into /dev/null: no worker is to print what the daemon began
        os.environ.update(worker_environment(os.environ))
        os.chdir(home)
        become_zygote(control, death_pipe=death_pipe[0], home=home, began=began)
    finally:
        # Never return into the daemon's code, whatever happened.
        os._exit(70)
