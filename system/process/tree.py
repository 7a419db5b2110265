# SPDX-License-Identifier: Apache-2.0
"""Stops a whole process tree: terminate, grace, kill, wait.

A tree is found in three ways at once: by parents (misses processes whose parent died), by session
and process group (misses those that called `setsid`), and by cgroup, if there is one (misses none).
Waits use pidfds: nothing is polled, and only its own parent reaps a zombie.

A shim has its own, smaller way to end its server (`server_process.py`): it adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable

from ..memory.cgroups import Cgroup
from . import macos
from .proc import ProcessStat, read_stat
from .process_identity import IS_LINUX, ProcessIdentity

KILL_WAIT_SECONDS = 5.0  # after SIGKILL; longer only for a process stuck in the kernel
_KILL_ROUNDS = 20  # repeated because a tree may fork while it is killed


def tree_of(
    pid: int, *, session: bool = True, cgroup: Cgroup | None = None
) -> list[ProcessIdentity]:
    """Return every living process of the tree at `pid`; `pid` itself is first, if it lives.

    This works if `pid` is dead, because its session, process group and cgroup may have survived it.
    The kernel never reuses a number that is still a session's or group's.
    """
    if IS_LINUX:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
        stats = [stat for each in pids if (stat := read_stat(each)) is not None]
    else:
        stats = list(macos.all_stats())
    members = descendants(stats, pid)
    if session:
        members |= {s.pid for s in stats if pid in (s.session, s.group)}
    if cgroup is not None:
        members |= set(cgroup.pids())
    members.discard(os.getpid())
    found = [s for s in stats if s.pid in members and not s.is_dead]
    found.sort(key=lambda s: (s.pid != pid, s.started_seconds, s.pid))
    return [ProcessIdentity.of_stat(s) for s in found]


def descendants(stats: Iterable[ProcessStat], pid: int) -> set[int]:
    """Return `pid` and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in stats:
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    pending = [pid]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(children.get(current, ()))
    return found


def stop_tree(
    identity: ProcessIdentity,
    *,
    grace_seconds: float,
    session: bool = True,
    cgroup: Cgroup | None = None,
) -> list[int]:
    """Stop the tree: SIGTERM, at most `grace_seconds`, SIGKILL, and wait for the end.

    A pid that now belongs to another process is left alone, and so is its session. Returns the pids
    that were signalled; none when everything was dead already.
    """
    signalled: dict[int, None] = {}
    if identity.pid <= 1:
        return []  # not a process, or the root of all: never stopped
    if grace_seconds > 0:
        members = _members(identity, session, cgroup)
        signalled |= dict.fromkeys(signal_all(members, signal.SIGTERM))
        wait_until_dead(members, grace_seconds)
    for _ in range(_KILL_ROUNDS):
        members = _members(identity, session, cgroup)
        if not members:
            break
        signalled |= dict.fromkeys(signal_all(members, signal.SIGKILL))
        wait_until_dead(members, KILL_WAIT_SECONDS)
    return list(signalled)


def wait_until_dead(members: Iterable[ProcessIdentity], timeout_seconds: float) -> bool:
    """Wait until all have ended (a zombie counts as ended); False if time runs out first."""
    deadline = time.monotonic() + timeout_seconds
    if not hasattr(os, "pidfd_open"):
        return macos.wait_until_dead(members, timeout_seconds)
    for member in members:
        if (fd := member.open_pidfd()) is not None:
            try:
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
            finally:
                os.close(fd)
    return True


def _members(
    identity: ProcessIdentity, session: bool, cgroup: Cgroup | None
) -> list[ProcessIdentity]:
    """Return the tree's living processes, unless the root's pid belongs to another process now."""
    is_reused = False
    with contextlib.suppress(ProcessLookupError):
        is_reused = ProcessIdentity.of(identity.pid) != identity
    if not is_reused:
        return tree_of(identity.pid, session=session, cgroup=cgroup)
    found: list[ProcessIdentity] = []
    for pid in [] if cgroup is None else cgroup.pids():
        with contextlib.suppress(ProcessLookupError):
            identity = ProcessIdentity.of(pid)
            if identity.is_alive() and pid != os.getpid():
                found.append(identity)
    return found


def signal_all(members: Iterable[ProcessIdentity], number: int) -> list[int]:
    """Send each process a signal; returns the pids of those that got it."""
    signalled = []
    for member in members:
        with contextlib.suppress(PermissionError):
            if member.signal(number):
                signalled.append(member.pid)
    return signalled
