# SPDX-License-Identifier: Apache-2.0
"""`Starter`: how the host makes its children, by forking itself or as programs of their own.

    shard, isolated ──▶ link, orders, memory group ──▶ fork ──▶ forget the host ──▶ `serve_as`
                                                  └──▶ program, where a fork is not safe

What a child does then: `shard.py`. When one is to be made, and what becomes of it: `zygote.py`.

A machine may have no room for one more process, or no descriptor: then nothing is left behind, and
the caller hears of it (`OSError`). That is nobody's end: who lives goes on living.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never, Protocol

from ...system import after_fork
from ...system.cgroups import Cgroup
from ...system.descriptors import Message, packet_pair
from ...system.prctl import set_thread_name
from ..ipc.child_config import ChildConfig
from ..ipc.scoreboard import Counters, Field, Scoreboard
from ..shard import shard as shard  # here: what is imported before a fork, all children share
from .children import Child
from .exec_children import spawn, start_program, what_forbids_forking
from .memory_watchdog import LOOK_SECONDS
from .session_cgroup import SessionGroups

if TYPE_CHECKING:
    from ..environment.plan import Plan
    from ..protocol import HostConfig

ServeAs = Callable[[ChildConfig, Scoreboard, bytes], Never]  # what a forked child does

log = logging.getLogger("openenvd.env_host")


class Parent(Protocol):
    """The host, as far as its children are made of it."""

    def own_fds(self) -> list[int]:
        """All descriptors that are its alone, or another child's."""

    def forget(self) -> None:
        """In a child: nothing of the host's is to be done any more."""


class Starter:
    """Makes shards and the processes of isolated sessions."""

    def __init__(
        self,
        parent: Parent,
        config: HostConfig,
        plan: Plan,
        scoreboard: Scoreboard,
        listener: socket.socket,
        serve_as: ServeAs,
    ) -> None:
        self._parent = parent
        self._config = config
        self._plan = plan
        self._scoreboard = scoreboard
        self._listener = listener
        self._serve_as = serve_as
        self._inboxes = [packet_pair() for _ in range(plan.shards)]  # reading, writing
        self._groups: SessionGroups | None = None
        self._number = 0
        self._can_fork = False
        self.world: str | None = None  # where the state process is, if sessions share a state

    @property
    def fds(self) -> list[int]:
        """Its descriptors, which are the host's."""
        return [self._listener.fileno(), *(e.fileno() for pair in self._inboxes for e in pair)]

    @property
    def start_state(self) -> Callable[[dict[str, Any], tuple[int, ...]], int] | None:
        """Starts the state process as a program; None: it can be forked."""
        return None if self._can_fork else self._start_program

    def get_ready(self) -> None:
        """Once, before the first child: what they all share must not change any more."""
        self._open_groups()
        obstacle = what_forbids_forking()
        self._can_fork = obstacle is None
        if obstacle is not None:
            log.warning(
                "%s; so each process that serves imports the environment for itself", obstacle
            )
        set_thread_name(f"host {self._config.name}")
        gc.collect()
        gc.freeze()

    def shard(self, index: int, *, isolated: int) -> Child:
        """A new process for a shard; `isolated`: sessions that have processes of their own.

        Raises:
            OSError: there is no room for another process.
        """
        counters = self._scoreboard[index]
        counters[Field.GENERATION] += 1
        ours, theirs = packet_pair()
        orders = ChildConfig(
            index=index,
            generation=counters[Field.GENERATION],
            shards=self._plan.shards,
            rows=len(self._scoreboard),
            max_sessions=self._plan.share(index),
            exclusive=self._plan.exclusive,
            scoreboard_fd=self._scoreboard.fd,
            link_fd=theirs.detach(),
            inbox_fd=self._inboxes[index][0].fileno(),
            inbox_fds=tuple(writing.fileno() for _, writing in self._inboxes),
            listen_fd=self._listener.fileno(),
            isolates=self._plan.isolates,
            isolated=isolated,
            world=self.world,
        )
        return self._start(Child(0, orders, ours, time.monotonic()), b"")

    def isolated(self, message: Message, counters: Counters) -> Child:
        """A process for the session of one connection; takes the slot.

        Raises:
            OSError: there is no room for another process; the connection is still the caller's.
        """
        counters[Field.GENERATION] += 1
        ours, theirs = packet_pair()
        orders = ChildConfig(
            index=counters.index,
            generation=counters[Field.GENERATION],
            shards=self._plan.shards,
            rows=len(self._scoreboard),
            max_sessions=1,
            exclusive=self._plan.exclusive,
            scoreboard_fd=self._scoreboard.fd,
            link_fd=theirs.detach(),
            connection_fd=message.fds[0],
            since=message.head["since"],
            world=self.world,
        )
        counters[Field.PID] = -1  # taken
        new = Child(
            0, orders, ours, time.monotonic(), connection_fd=message.fds[0], group=self._group()
        )
        try:
            return self._start(new, message.body)
        except OSError:
            counters.clear()
            raise

    def _open_groups(self) -> None:
        if not (self._plan.isolates and self._config.session_memory_bytes):
            return
        self._groups = SessionGroups()
        if not self._groups.are_available:
            log.warning(
                "isolated sessions have no memory cgroups (%s); what they hold is looked at "
                "instead, %d times a second",
                self._groups.why_not,
                1 / LOOK_SECONDS,
            )

    def _group(self) -> Cgroup | None:
        limit = self._config.session_memory_bytes
        if limit is None or self._groups is None or not self._groups.are_available:
            return None
        self._number += 1
        try:
            return self._groups.create(self._number, limit)
        except OSError as exc:
            log.warning("a session has no memory cgroup: %s", exc)
            return None

    def _start(self, new: Child, head: bytes) -> Child:
        parent = os.getpid()
        try:
            new.pid = after_fork.fork() if self._can_fork else spawn(self._config, new.orders, head)
        except OSError:
            os.close(new.orders.link_fd)
            new.link.close()
            if new.group is not None:
                new.group.remove()
            raise
        if new.pid == 0:
            self._become(new, head, parent)
        os.close(new.orders.link_fd)
        return new

    def _become(self, new: Child, head: bytes, parent: int) -> Never:
        """In the child: leave everything that is the host's behind."""
        if new.group is not None:
            _enter(new.group)
        orders = new.orders
        to_close = {*self.fds, *self._parent.own_fds(), new.link.detach()} - set(orders.fds)
        after_fork.leave_parent(parent, _name_of(orders, self._config.name), to_close)
        self._parent.forget()
        self._serve_as(orders, self._scoreboard, head)

    def _start_program(self, told: dict[str, Any], fds: tuple[int, ...]) -> int:
        return start_program(self._config, told, fds)


def _enter(group: Cgroup) -> None:
    try:
        group.add(os.getpid())
    except OSError as exc:  # serve all the same: the replica's own cap still holds
        log.warning("a session runs without its memory cap: %s", exc)


def _name_of(orders: ChildConfig, name: str) -> str:
    kind = "session" if orders.connection_fd is not None else f"shard {orders.index}"
    return f"{kind} {name}"
