# SPDX-License-Identifier: Apache-2.0
"""`IsolatedSessions`: sessions that have processes of their own, as the supervisor sees them.

    front-end shard ──connection to isolate──▶ `begin` ──free row──▶ process (`spawn.py`)
      ▲                                │ none: a session is over whose process is still exiting
      │                                └──▶ waits ──a process exits──▶ `begin_next`
      ├──connection for a session──────▶ `forward` ──▶ its process
      └──how many are over───────────── `notify_front_end`

The front-end shard, number 0, counts them: it admits a connection before it sends it here. The slot
is free when the session is over (`free_slot`), before its process has exited: the client may
be back by then.

A session's process adopts the orphans among its descendants and ends them with the session. When
the session's process is killed, the supervisor adopts them, and `Orphans` kills them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque

from ...system.process.descriptors import Message, close_all, send_message
from ...system.process.proc import children_of, descendants_of, kill, read_stat, reap
from ..ipc.scoreboard import Field, Scoreboard
from .children import Child, Children
from .close_notices import refuse
from .spawn import Spawner

STARTED_SECONDS = 0.02  # by which a process may seem to have started early: the kernel counts 0.01
LINGERING = 16  # processes of isolated sessions that are over, and have not exited

log = logging.getLogger("openenvd.env_host")


def rows_for(sessions: int) -> int:
    """Return the scoreboard rows to have: a session's slot is free before its process exits."""
    return 2 * sessions + LINGERING


def sessions_in(rows: int) -> int:
    """Return how many sessions these rows hold, the front-end shard's left out."""
    return (rows - 1 - LINGERING) // 2


class IsolatedSessions:
    """Starts the processes of isolated sessions; reports their ends to the front-end shard."""

    def __init__(self, scoreboard: Scoreboard, children: Children, spawner: Spawner) -> None:
        self._scoreboard = scoreboard
        self._children = children
        self._spawner = spawner
        self._waiting: deque[Message] = deque()  # connections to isolate that have no row yet
        self.over = 0  # ended sessions not yet reported to the front-end shard

    def __len__(self) -> int:
        held = sum(e.is_isolated * e.holds_slot + e.branches for e in self._children)
        return held + len(self._waiting)

    def begin(self, message: Message) -> Child | None:
        """Start a process for the session of one connection; None when it waits or is refused."""
        if not message.fds:  # no descriptor was left to receive it
            log.warning("a session was dropped: the host has too few file descriptors (ulimit -n)")
            self.over += 1
            return None
        rows = list(self._scoreboard)[self._scoreboard.shards :]
        counters = next((row for row in rows if not row[Field.PID]), None)
        if counters is None:
            self._waiting.append(message)  # for a process whose session is over to exit
            return None
        try:
            new = self._spawner.isolated(message, counters)
        except OSError as exc:
            log.warning("no process for an isolated session, refusing its client: %s", exc)
            text = f"The process of another session cannot be started: {exc.strerror}."
            refuse(message.fds[0], text)
            self.over += 1
            return None
        if message.head.get("http"):  # the front-end shard's question, not the session's connection
            os.close(message.fds[0])
            new.connection_fd = None
        return new

    def begin_next(self) -> Child | None:
        """Start a process for the first connection that waits, if any, after one has exited."""
        return self.begin(self._waiting.popleft()) if self._waiting else None

    def forward(self, message: Message) -> None:
        """Send a connection to the process of the session that it is for."""
        child = self._children.at(message.head["for"])
        if child is not None:
            with contextlib.suppress(OSError):
                send_message(child.link, message)
        close_all(message.fds)

    def free_slot(self, child: Child) -> None:
        """Count a session as over: it has ended, or its process has exited; the first counts."""
        if child.is_isolated and child.holds_slot:
            child.holds_slot = False
            self.over += 1 + child.branches
            child.branches = 0

    def count_branches(self, child: Child, change: int, processes: int) -> None:
        """Give a session's process slots for branches, all or none; or take some back.

        It is given a memory cgroup for each of these processes, where sessions have them.
        """
        taken, most = len(self), self._spawner.plan.max_sessions
        is_granted = change <= 0 or taken + change <= most
        if is_granted:
            child.branches += change
            self.over -= change
        if processes:
            groups = self._spawner.session_groups(processes) if is_granted else []
            child.groups += child.new_groups
            child.new_groups = groups
            first = groups[0].to_json() if groups else None
            answer = {"granted": is_granted, "taken": taken, "most": most, "group": first}
            with contextlib.suppress(OSError):
                send_message(child.link, Message(answer))
            return
        child.ended += 1
        if child.ended * 4 > len(child.groups):
            child.groups = [each for each in child.groups if not each.remove()]
            child.ended = 0

    def notify_front_end(self) -> None:
        """Report the free slots to the front-end shard; again later if it cannot read now."""
        front_end = self._children.at(0) if self.over else None
        if front_end is None:
            return  # the next front-end shard gets the number of sessions when it starts
        with contextlib.suppress(OSError):
            if not send_message(front_end.link, Message({"isolated_ended": self.over})):
                return
        self.over = 0

    def cancel(self) -> None:
        """Drop the connections that wait."""
        while self._waiting:
            close_all(self._waiting.popleft().fds)


class Orphans:
    """Kills the programs that the supervisor adopts from isolated sessions, and reaps all orphans.

    It looks when a child has exited: the programs of a session become orphans when its process
    exits. An orphan that appears then is the session's, unless it was started before the session,
    or is in the supervisor's own process group. Peers were started by a shard, and continue.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._spared: set[int] = set()
        self._killed: dict[int, float] = {}  # of a session that began at that time

    def look(self, state_pid: int | None, *, ended_since: float | None = None) -> None:
        """Reap adopted processes that have exited, and kill those that sessions have left.

        Args:
            state_pid: The process of the shared state, which is no orphan.
            ended_since: When the oldest of those isolated sessions began (monotonic) whose
                processes were just reaped; None: none was. Children of killed orphans die, too.
        """
        pids = set(children_of(os.getpid())) - {*self._children.pids, state_pid}
        dead = {pid for pid in pids if _is_dead(pid)}
        begins = [ended_since, *(self._killed.get(pid) for pid in dead)]
        since = min((each for each in begins if each is not None), default=None)
        for pid in dead:
            reap(pid)
        self._spared &= pids - dead
        self._killed = {p: at for p, at in self._killed.items() if p not in dead} if pids else {}
        if not (new := pids - dead - self._spared - self._killed.keys()):
            return
        if since is not None:
            left = {pid for pid in new if _is_of_session(pid, since)}
            self._spared |= new - left
            for pid in left.union(*map(descendants_of, left)):
                self._killed[pid] = since
                kill(pid)
        elif not any(each.is_isolated and _is_dead(each.pid) for each in self._children):
            self._spared |= new  # otherwise the next call knows whose session they are of


def _is_of_session(pid: int, since: float) -> bool:
    """Return whether an orphan may be of a session that began then, by its process group."""
    stat = read_stat(pid)
    if stat is None or stat.group == os.getpgrp():
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_seconds
    return time.monotonic() - age >= since - STARTED_SECONDS


def _is_dead(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.is_dead
