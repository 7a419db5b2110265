# SPDX-License-Identifier: Apache-2.0
"""What to do with a worker's tree when it must die, and with what is left of it when it has died.

An operation's children are in the worker's process group, in another group of its session, in a
session of their own, or, where there are cgroups, at least in its cgroup. While the worker lives
its descendants can be counted; afterwards its group, its session and its cgroup still tell. What
must outlive a worker (a replica's keeper) is a grandchild in a session of its own, and leaves the
cgroup.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from .pool import PooledWorker
from .sources import signal_group


def started_at(pid: int) -> float:
    """When the process began, seconds since the epoch; 0 when it is gone already."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def kill_tree(worker: PooledWorker) -> None:
    """SIGKILL to the worker and everything below it."""
    # Before it dies: afterwards they are somebody else's children.
    below = descendants(worker.pid)
    signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    kill_all(below)


def end_survivors(worker: PooledWorker) -> list[int]:
    """SIGKILL to what a dead worker left; returns the pids that were found.

    Looking through all sessions costs milliseconds, so it is done when there is reason to: the
    worker died under a task, or some of its group is left.
    """
    left_group = signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    if worker.run is None and not left_group:
        return []
    survivors = session_members(worker.pid)
    kill_all(survivors)
    return [process.pid for process in survivors]


def descendants(pid: int) -> list[psutil.Process]:
    """The children of the process, and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def session_members(leader: int) -> list[psutil.Process]:
    """Every other process of the session that `leader` began.

    No new process can be given the pid `leader` while the session lives.
    """
    members = []
    for entry in os.scandir("/proc") if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit() and int(entry.name) != leader and in_session(entry.name, leader):
            with contextlib.suppress(psutil.Error):
                members.append(psutil.Process(int(entry.name)))
    return members


def in_session(pid: str, leader: int) -> bool:
    """Whether the process is of that session (proc_pid_stat(5), field 6) and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    state, _, _, session = stat.rpartition(b")")[2].split()[:4]
    return int(session) == leader and state != b"Z"


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL to each that is still the process it was."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
