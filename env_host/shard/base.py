# SPDX-License-Identifier: Apache-2.0
"""`Process`: what shards (`shard.py`) and isolated sessions (`isolated_session.py`) have in common.

    a connection ─▶ Arrival ─▶ `_route` ─┬─ wants a session ─▶ Admission ─its turn─▶ Server
                                         ├─ anything else ────────────────────────▶ Server
                                         └─ another's session ─▶ `_hand_over`
    host ◀── link: which sockets have sessions (`Guard`)

The host is dead when the link ends (the kernel kills us as well): then this process ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, cast

from ...system.descriptors import Message
from ..errors import SessionEnded
from ..ipc.child_config import ChildConfig
from ..ipc.fd_messages import Post
from ..ipc.scoreboard import Field, Scoreboard, now_microseconds
from ..serving.app import HostApp
from ..serving.uvicorn_server import STOP_SECONDS, Server
from ..sessions.idle_timeout import reap_idle
from ..sessions.routing import Siblings
from ..sessions.table import SessionTable
from .acceptor import Arrival
from .admission import Admission, Waiting
from .connection_registry import ConnectionRegistry
from .request_head import Owner, owner_of, read_head

if TYPE_CHECKING:
    from ..environment.definition import Definition
    from ..protocol import HostConfig
    from ..shared_state.errors import WorldLost

GOING_AWAY_CLOSE = 1001
HEARTBEAT_SECONDS = 0.1
LAST_WORD_TURNS = 10
_STOPPING = "The environment is stopping."

log = logging.getLogger("openenvd.env_host")


class Process:
    """What shards and isolated sessions have in common. Within a running loop."""

    def __init__(
        self,
        config: HostConfig,
        definition: Definition,
        own: ChildConfig,
        scoreboard: Scoreboard,
    ) -> None:
        self._own = own
        self._scoreboard = scoreboard
        self._counters = scoreboard[own.index]
        self._link_end = socket.socket(fileno=own.link_fd)
        self.link = Post(self._link_end, on_message=self._on_link, on_end=self._orphaned)
        self.admission = Admission(
            scoreboard,
            own.index,
            timeout_seconds=config.admission_timeout_seconds,
            serve=self._admitted,
            refuse=self._serve if own.isolates else None,
            hand_over=self._hand_over,
        )
        owner = Owner(own.index, own.generation)
        self.registry = ConnectionRegistry(self.link, owner, self._count)
        self.table = SessionTable(
            definition,
            _most_here(own),
            exclusive=own.exclusive,
            hooks=self.registry,
            admission=self.admission,
        )
        app = HostApp(
            definition,
            self.table,
            manifest=config.manifest,
            step_timeout_seconds=config.step_timeout_seconds,
            scoreboard=scoreboard,
            siblings=self._siblings(),
        )
        self.server = Server(app)
        self._idle_seconds = config.idle_timeout_seconds or definition.session_timeout_seconds
        self._stopping = asyncio.Event()
        self._isolated = own.isolated
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Serve from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        await self.server.start()
        counters, own = self._counters, self._own
        counters[Field.PID] = os.getpid()
        counters[Field.GENERATION] = own.generation
        counters[Field.MAX_SESSIONS] = own.max_sessions
        counters[Field.SESSIONS] = self._isolated
        counters[Field.ISOLATED] = int(own.connection_fd is not None)
        counters[Field.WATCHDOG] = now_microseconds()
        counters[Field.READY] = 1
        self._beat()
        if self._idle_seconds:
            reaping = reap_idle(self.table, self._idle_seconds)
            self._tasks.append(asyncio.create_task(reaping, name="reap-idle"))

    async def stop(self) -> None:
        """Tell the sessions why, end them, finish what HTTP is under way."""
        self._counters[Field.STOPPING] = 1
        self.admission.stop()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.table.stop(SessionEnded(_STOPPING, GOING_AWAY_CLOSE))
        except TimeoutError:
            log.warning("some environments did not close within %g s", STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        for _ in range(LAST_WORD_TURNS):  # a session gives up its slot before its last word
            await asyncio.sleep(0)
        await self.server.stop()
        self.registry.flush()
        self.link.close()

    def lose_world(self, lost: WorldLost) -> None:
        """What the sessions share is gone: they are over."""
        for session in self.table:
            if session.socket is not None:
                session.socket.end(lost)
            else:
                self._leaving.add(task := asyncio.create_task(self.table.close(session)))
                task.add_done_callback(self._leaving.discard)

    def _beat(self) -> None:
        counters, table = self._counters, self.table
        counters[Field.HEARTBEAT] = now_microseconds()
        counters[Field.BUSY] = sum(session.busy for session in table)
        counters[Field.BEGUN] = table.counts.begun
        counters[Field.STEPS] = table.counts.steps
        counters[Field.STEP_TIMEOUTS] = table.counts.step_timeouts
        asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    def _count(self) -> None:
        """The number of sessions has changed, or a slot is free."""
        self._counters[Field.SESSIONS] = self.table.taken + self._isolated
        self.admission.changed()

    def _arrival(self, data: bytes = b"", since: int = 0) -> Arrival:
        return Arrival(self._route, self._lost, counters=self._counters, data=data, since=since)

    def _lost(self, arrival: Arrival) -> None:
        self.admission.forget(arrival)

    def _route(self, arrival: Arrival) -> None:
        head = read_head(bytes(arrival.data))
        # An HTTP connection may be for any session next; a session's own process knows no other.
        is_whole = head.is_upgrade or not self._own.isolates
        if head.session_id and is_whole and (index := self._other_owner(head.session_id)):
            self._hand_over(arrival, index - 1)
        elif head.wants_session:
            self.admission.consider(arrival)
        else:
            self._serve(arrival)

    def _other_owner(self, session_id: str) -> int:
        """The index, from 1, of the other process that has this session; 0: it is not another."""
        owner = owner_of(session_id)
        if owner is None or owner.index == self._own.index or owner.index >= len(self._scoreboard):
            return 0
        counters = self._scoreboard[owner.index]
        is_there = counters.is_serving and counters[Field.GENERATION] % 2**16 == owner.generation
        return owner.index + 1 if is_there else 0

    def _serve(self, arrival: Waiting) -> None:
        cast("Arrival", arrival).serve_by(self.server.make_protocol())

    def _admitted(self, arrival: Waiting) -> None:
        self._serve(arrival)

    def _hand_over(self, arrival: Waiting, index: int) -> None:
        raise NotImplementedError

    def _siblings(self) -> Siblings | None:
        """Who else serves the environment, and can be asked."""
        return None

    def _on_link(self, message: Message) -> None:
        """The host has said something."""

    def _orphaned(self) -> None:
        os._exit(1)


def _most_here(own: ChildConfig) -> int:
    """How many sessions may be in the process itself: none where each has one of its own."""
    if own.isolates:
        return 0
    return 1 if own.exclusive else own.max_sessions
