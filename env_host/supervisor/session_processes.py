# SPDX-License-Identifier: Apache-2.0
"""The supervisor's part in isolated sessions: their processes, and the orphans they leave.

    shard ── link: one end of a socket pair ──▶ `begin` ──fork──▶ session process, with that end
          ── copies will be made ──▶ `_announce` ──▶ a memory cgroup for each
          ── their pids ──▶ `_register`             they are children of the supervisor
          ── kill a process ──▶ `_kill`
          ◀── how it has ended ── `ended` ◀── it was reaped (`shard_pool.py`)

Each belongs to the shard that has its session (`Child.holder`), and is killed when the shard exits.

A session's process adopts the orphans among its descendants and ends them with the session. When
the session's process is killed, the supervisor adopts them, and `Orphans` kills them. Copies are
the supervisor's children before it knows their pids; until then `Orphans` does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import socket
import time
from collections import deque

from ...system.memory.cgroups import Cgroup
from ...system.process.descriptors import Message, send_message
from ...system.process.proc import children_of, descendants_of, kill, read_stat, reap
from ...system.text.json_lines import Json
from ..sessions.remote_session import HEAD, VALUE
from .children import Child, Children
from .spawn import Spawner

STARTED_SECONDS = 0.02  # by which a process may seem to have started early: the kernel counts 0.01

log = logging.getLogger("openenvd.env_host")


class SessionProcesses:
    """Starts session processes for the shards, and reports their ends."""

    def __init__(self, children: Children, spawner: Spawner) -> None:
        self._children = children
        self._spawner = spawner
        # Groups for copies that are being made, by shard and the number of its request.
        self._announced: dict[tuple[Child, int], list[Cgroup]] = {}
        self._unsent: deque[tuple[Child, Message]] = deque()
        self._emptied: list[Cgroup] = []  # of processes that have ended, to be removed

    @property
    def is_forking(self) -> bool:
        """Return whether copies are being made whose pids are not known yet."""
        return bool(self._announced)

    @property
    def has_unsent(self) -> bool:
        """Return whether messages wait to be sent."""
        return bool(self._unsent)

    def take(self, holder: Child, message: Message) -> bool:
        """Handle a message from a shard; returns False if it is not about a session process."""
        head = message.head
        if "session" in head:
            self._begin(holder, message)
        elif "copies" in head:
            self._announce(holder, head["copies"], head["number"])
        elif "copied" in head:
            self._register(holder, head["copied"], head["number"])
        elif len(head) == 1 and (what := next(iter(head))) in ("held", "over", "end"):
            child = self._children.find(head[what])
            if child is not None and child.holder is holder:
                _note(child, what)
        else:
            return False
        return True

    def _begin(self, holder: Child, message: Message) -> None:
        """Start a process; the message carries its end of the socket pair."""
        if not message.fds:  # no descriptor was left to receive it: the shard sees the end
            log.warning("a session was dropped: the host has too few file descriptors (ulimit -n)")
            return
        with socket.socket(fileno=message.fds[0]) as end:
            try:
                self._children.add(self._spawner.session(holder, end, message.head["session"]))
            except OSError as exc:
                log.warning("no process for an isolated session, refusing its client: %s", exc)
                text = f"The process of another session cannot be started: {exc.strerror}."
                refused = marshal.dumps({"refused": text})
                with contextlib.suppress(OSError):
                    end.sendall(HEAD.pack(len(refused), VALUE) + refused)

    def _announce(self, holder: Child, count: int, number: int) -> None:
        groups = self._announced[holder, number] = self._spawner.session_groups(count)
        answer: list[Json | None] = [each.to_json() for each in groups]
        answer = answer or [None] * count
        self._send(holder, Message({"groups": answer, "number": number}))

    def _register(self, holder: Child, pids: list[int], request: int) -> None:
        groups = self._announced.pop((holder, request), [])
        for number, pid in enumerate(pids):
            group = groups[number] if groups else None
            new = self._spawner.session_child(holder, group)
            new.pid = pid
            self._children.add(new)
            _set_apart(new)
        self._emptied += groups[len(pids) :]

    def ended(self, child: Child, text: str) -> None:
        """Report that a process has ended, and kill everything that it has started."""
        kill(child.pid, group=True)
        if child.group is not None:
            child.group.kill()
            self._emptied.append(child.group)
        self._emptied = [group for group in self._emptied if not group.remove()]
        if child.holder is not None and self._children.find(child.holder.pid) is child.holder:
            self._send(
                child.holder, Message({"ended": child.pid, "number": child.number, "text": text})
            )

    def shard_exited(self, holder: Child) -> None:
        """Kill the session processes of a shard that has exited."""
        for key in [each for each in self._announced if each[0] is holder]:
            self._emptied += self._announced.pop(key)
        for child in self._children.sessions:
            if child.holder is holder:
                _kill(child)

    def _send(self, shard: Child, message: Message) -> None:
        self._unsent.append((shard, message))
        self.send()

    def send(self) -> None:
        """Send the messages for which the shards had no room before."""
        for _ in range(len(self._unsent)):
            shard, message = self._unsent.popleft()
            is_sent = True
            if shard.link is not None:
                with contextlib.suppress(OSError):  # it has exited
                    is_sent = send_message(shard.link, message)
            if not is_sent:
                self._unsent.append((shard, message))


def _set_apart(copy: Child) -> None:
    """Give a copy its process group and cgroup, in case it has not run yet.

    Until then it has those of its parent, with which it would be killed.
    """
    with contextlib.suppress(OSError):  # it has exited
        os.setpgid(copy.pid, copy.pid)
        if copy.group is not None:
            copy.group.add(copy.pid)


def _note(child: Child, what: str) -> None:
    """Record that a process has a session, or that the session is over; or kill the process."""
    child.holds_slot = what == "held"
    if what == "held":
        child.started_at = time.monotonic()
    if what == "end":
        _kill(child)


def _kill(child: Child) -> None:
    """Kill a process and its group, which it may not have created yet."""
    child.is_retired = True
    kill(child.pid, group=True)
    kill(child.pid)


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
        elif not any(_is_dead(each.pid) for each in self._children.sessions):
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
