# SPDX-License-Identifier: Apache-2.0
"""A shard: one process with one event loop that serves sessions from the shared socket.

    shared socket ─▶ Acceptor ─┬─▶ Arrival ─┬─▶ served here (`process.py`)
    inbox ─────────────────────┘            └─▶ that shard's inbox which has its session, or room

    host ◀── link: ready, a session to isolate

With `isolates`, sessions are not served here: each connection goes to the host, which forks a
process for it (`isolated_session.py`: the same, for one session, without the shared socket). What
is for that session later (HTTP, `?session_id=`) goes to it by the same way, through the host.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ...system.descriptors import Message
from ...system.loop_lag import EventLoopLagMonitor, LagSnapshot, LoopState
from ..errors import CapacityReached
from ..ipc.child_config import ChildConfig
from ..ipc.fd_messages import Post
from ..ipc.scoreboard import Field, Scoreboard, now_microseconds
from ..sessions.routing import Siblings
from ..shared_state.setup import WorldFactory, connect_world
from .acceptor import Acceptor, Arrival
from .admission import Waiting
from .base import Process
from .isolated_session import IsolatedSession

if TYPE_CHECKING:
    from ..environment.definition import Definition
    from ..protocol import HostConfig

_LOOP_STATES = list(LoopState)


class Shard(Process):
    """One of the processes that accept from the shared socket."""

    def __init__(
        self,
        config: HostConfig,
        definition: Definition,
        own: ChildConfig,
        scoreboard: Scoreboard,
    ) -> None:
        super().__init__(config, definition, own, scoreboard)
        assert own.listen_fd is not None
        assert own.inbox_fd is not None
        listener = socket.socket(fileno=own.listen_fd)
        others = scoreboard.others(own.index)
        self._acceptor = Acceptor(listener, self._counters, others, self._arrival)
        self._ends = [socket.socket(fileno=fd) for fd in own.inbox_fds]
        self._inboxes = [Post(end) for end in self._ends]
        self._inbox_end = socket.socket(fileno=own.inbox_fd)
        self._inbox = Post(self._inbox_end, on_message=self._adopt)
        self._lag = EventLoopLagMonitor(f"shard {own.index}", on_heartbeat=self._note_lag)

    async def run(self, head: bytes = b"") -> None:
        """Serve until told to stop."""
        await self.start()
        self._lag.start()
        self._acceptor.start()
        self.link.send(Message({"ready": True}))
        await self._stopping.wait()
        self._acceptor.stop()
        self._inbox.close()
        await self.stop()
        self._lag.stop()

    def _hand_over(self, arrival: Waiting, index: int) -> None:
        fd = cast("Arrival", arrival).take_descriptor()
        if fd is None:
            return
        self._counters.add(Field.HANDED_OVER)
        self._send_to(index, fd, arrival.since, bytes(cast("Arrival", arrival).data))

    def _send_to(self, index: int, fd: int, since: int, body: bytes = b"") -> None:
        """Give another process a connection; the host knows those of isolated sessions."""
        if index < len(self._inboxes):
            self._inboxes[index].send(Message({"since": since}, body, (fd,)))
        else:
            self.link.send(Message({"for": index, "since": since}, body, (fd,)))

    def _siblings(self) -> Siblings | None:
        def owner(session_id: str) -> int | None:
            return index - 1 if (index := self._other_owner(session_id)) else None

        def send(index: int, fd: int) -> None:
            self._send_to(index, fd, now_microseconds())

        isolate = self._room_for_isolated if self._own.isolates else None
        return Siblings(owner_of=owner, roomier=self._roomier, hand_over=send, isolate=isolate)

    async def _room_for_isolated(self) -> Callable[[int], None]:
        """Take the slot of a session that is begun over HTTP; returns what starts its process."""
        if not await self.admission.wait_for_room(lambda: True):
            raise CapacityReached(*self.admission.totals)
        self._isolated += 1
        self._count()

        def start(fd: int) -> None:
            head = {"isolate": True, "http": True, "since": now_microseconds()}
            self.link.send(Message(head, b"", (fd,)))

        return start

    def _roomier(self) -> int | None:
        """The shard with the most room, when there is none here."""
        others = self._scoreboard.others(self._own.index)
        now = now_microseconds()
        roomy = [counters for counters in others if counters.room and counters.is_responsive(now)]
        if self._counters.room or not roomy:
            return None
        return max(roomy, key=lambda counters: counters.room).index

    def _adopt(self, message: Message) -> None:
        """Another shard has handed a connection over."""
        if not message.fds:
            return
        arrival = self._arrival(message.body, message.head["since"])
        self._acceptor.open(socket.socket(fileno=message.fds[0]), arrival)

    def _admitted(self, arrival: Waiting) -> None:
        if self._own.isolates:
            self._isolate(cast("Arrival", arrival))
        else:
            self._serve(arrival)

    def _isolate(self, arrival: Arrival) -> None:
        fd = arrival.take_descriptor()
        if fd is None:
            return
        self._isolated += 1
        self._count()
        head = {"isolate": True, "since": arrival.since}
        self.link.send(Message(head, bytes(arrival.data), (fd,)))

    def _on_link(self, message: Message) -> None:
        self._isolated -= message.head.get("isolated_ended", 0)
        self._count()

    def _note_lag(self, lag: LagSnapshot) -> None:
        """On the watchdog's thread."""
        counters = self._counters
        counters[Field.WATCHDOG] = now_microseconds()
        counters[Field.LAG_P50] = int(lag.p50_seconds * 1e6)
        counters[Field.LAG_P99] = int(lag.p99_seconds * 1e6)
        counters[Field.LAG_MAX] = int(lag.max_seconds * 1e6)
        counters[Field.LOOP_STATE] = _LOOP_STATES.index(lag.state)


async def run_process(
    config: HostConfig,
    definition: Definition,
    own: ChildConfig,
    scoreboard: Scoreboard,
    head: bytes,
) -> None:
    """Be the process of these orders; `head` is what was read of an isolated one's connection."""
    kind = Shard if own.connection_fd is None else IsolatedSession
    if own.world is None:
        await kind(config, definition, own, scoreboard).run(head)
        return
    link = await connect_world(own.world, f"shard {own.index}.{own.generation}")
    shared = replace(definition, factory=WorldFactory(definition.factory, link))
    process = kind(config, shared, own, scoreboard)
    link.on_lost = process.lose_world
    try:
        await process.run(head)
    finally:
        await link.close()
