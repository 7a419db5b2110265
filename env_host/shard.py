# SPDX-License-Identifier: Apache-2.0
"""A shard: one process with one event loop that serves sessions from the shared socket.

                   ┌──────────── Admission ◀─ wants a session ─┐
    shared socket ─▶ Acceptor ─▶ Arrival ─▶ `_route` ──────────┴─ anything else ─▶ Server
    inbox ─────────────────────▶    │            └─ another's session ─▶ that shard's inbox
                                    │
    host ◀── link: ready, which sockets have sessions (`Guard`), a session to isolate

With `isolates`, sessions are not served here: each connection goes to the host, which forks a
process for it (`IsolatedSession` below: the same, for one session, without the shared socket). What
is for that session later (HTTP, `?session_id=`) goes to it by the same way, through the host.

The host is dead when the link ends (the kernel kills us as well): then this process ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from .acceptor import Acceptor, Arrival
from .admission import Admission, Waiting
from .affinity import Siblings
from .asgi import HostApp
from .board import Board, Word, now_microseconds
from .errors import CapacityReached, SessionEnded
from .guard import Guard
from .handover import Message, Post
from .heads import Owner, owner_of, read_head
from .idle import reap_idle
from .lag import EventLoopLagMonitor, LagSnapshot, LoopState
from .serve import STOP_SECONDS, Server
from .sessions import SessionTable
from .shared_state import WorldFactory, connect_world

if TYPE_CHECKING:
    from .definition import Definition
    from .protocol import HostConfig
    from .shared_state_errors import WorldLost

GOING_AWAY_CLOSE = 1001
HEARTBEAT_SECONDS = 0.1
LEAVING_LOOK_SECONDS = 0.05  # an isolated session's process, whose client may have gone
BEGIN_SECONDS = 30.0  # for an isolated session to begin
LAST_WORD_TURNS = 10
_LOOP_STATES = list(LoopState)
_STOPPING = "The environment is stopping."

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Orders:
    """What the host tells a process that it starts."""

    index: int  # its slot on the board
    generation: int
    shards: int
    slots: int
    max_sessions: int
    exclusive: bool  # the class allows one session at a time in a process
    board_fd: int
    link_fd: int
    inbox_fd: int | None = None  # where others hand connections over to it
    inbox_fds: tuple[int, ...] = ()  # where it hands them over to others, by index
    listen_fd: int | None = None
    isolates: bool = False
    isolated: int = 0  # sessions that have processes of their own already
    connection_fd: int | None = None  # an isolated session's
    world: str | None = None  # where the state process is, if sessions share a state
    since: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Orders:
        """The orders that `to_json` wrote."""
        return cls(**{**data, "inbox_fds": tuple(data["inbox_fds"])})

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors it keeps."""
        single = (self.board_fd, self.link_fd, self.inbox_fd, self.listen_fd, self.connection_fd)
        return (*(fd for fd in single if fd is not None), *self.inbox_fds)


class Process:
    """What shards and isolated sessions have in common. Within a running loop."""

    def __init__(
        self, config: HostConfig, definition: Definition, orders: Orders, board: Board
    ) -> None:
        self._orders = orders
        self._board = board
        self._slot = board[orders.index]
        self._link_end = socket.socket(fileno=orders.link_fd)
        self.link = Post(self._link_end, on_message=self._on_link, on_end=self._orphaned)
        self.admission = Admission(
            board,
            orders.index,
            timeout_seconds=config.admission_timeout_seconds,
            serve=self._admitted,
            refuse=self._serve if orders.isolates else None,
            hand_over=self._hand_over,
        )
        owner = Owner(orders.index, orders.generation)
        self.guard = Guard(self.link, owner, self._count)
        self.table = SessionTable(
            definition,
            _most_here(orders),
            exclusive=orders.exclusive,
            hooks=self.guard,
            admission=self.admission,
        )
        app = HostApp(
            definition,
            self.table,
            manifest=config.manifest,
            step_timeout_seconds=config.step_timeout_seconds,
            board=board,
            siblings=self._siblings(),
        )
        self.server = Server(app)
        self._idle_seconds = config.idle_timeout_seconds or definition.session_timeout_seconds
        self._stopping = asyncio.Event()
        self._isolated = orders.isolated
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Serve from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        await self.server.start()
        slot, orders = self._slot, self._orders
        slot[Word.PID] = os.getpid()
        slot[Word.GENERATION] = orders.generation
        slot[Word.MAX_SESSIONS] = orders.max_sessions
        slot[Word.SESSIONS] = self._isolated
        slot[Word.ISOLATED] = int(orders.connection_fd is not None)
        slot[Word.WATCHDOG] = now_microseconds()
        slot[Word.READY] = 1
        self._beat()
        if self._idle_seconds:
            reaping = reap_idle(self.table, self._idle_seconds)
            self._tasks.append(asyncio.create_task(reaping, name="reap-idle"))

    async def stop(self) -> None:
        """Tell the sessions why, end them, finish what HTTP is under way."""
        self._slot[Word.STOPPING] = 1
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
        self.guard.flush()
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
        slot, table = self._slot, self.table
        slot[Word.HEARTBEAT] = now_microseconds()
        slot[Word.BUSY] = sum(session.busy for session in table)
        slot[Word.BEGUN] = table.counts.begun
        slot[Word.STEPS] = table.counts.steps
        slot[Word.STEP_TIMEOUTS] = table.counts.step_timeouts
        asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    def _count(self) -> None:
        """The number of sessions has changed, or a slot is free."""
        self._slot[Word.SESSIONS] = self.table.taken + self._isolated
        self.admission.changed()

    def _arrival(self, data: bytes = b"", since: int = 0) -> Arrival:
        return Arrival(self._route, self._lost, slot=self._slot, data=data, since=since)

    def _lost(self, arrival: Arrival) -> None:
        self.guard.answering(arrival)
        self.admission.forget(arrival)

    def _route(self, arrival: Arrival) -> None:
        head = read_head(bytes(arrival.data))
        # An HTTP connection may be for any session next; a session's own process knows no other.
        is_whole = head.is_upgrade or not self._orders.isolates
        if head.session_id and is_whole and (index := self._other_owner(head.session_id)):
            self._hand_over(arrival, index - 1)
        elif head.wants_session:
            self.admission.consider(arrival)
            if arrival.waits:
                self.guard.waits(arrival)
        else:
            self._serve(arrival)

    def _other_owner(self, session_id: str) -> int:
        """The index, from 1, of the other process that has this session; 0: it is not another."""
        owner = owner_of(session_id)
        if owner is None or owner.index == self._orders.index or owner.index >= len(self._board):
            return 0
        slot = self._board[owner.index]
        is_there = slot.is_serving and slot[Word.GENERATION] % 2**16 == owner.generation
        return owner.index + 1 if is_there else 0

    def _serve(self, arrival: Waiting) -> None:
        self.guard.answering(cast("Arrival", arrival))
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


class Shard(Process):
    """One of the processes that accept from the shared socket."""

    def __init__(
        self, config: HostConfig, definition: Definition, orders: Orders, board: Board
    ) -> None:
        super().__init__(config, definition, orders, board)
        assert orders.listen_fd is not None
        assert orders.inbox_fd is not None
        listener = socket.socket(fileno=orders.listen_fd)
        others = board.others(orders.index)
        accepted = self.guard.accepted
        self._acceptor = Acceptor(listener, self._slot, others, self._arrival, accepted)
        self._ends = [socket.socket(fileno=fd) for fd in orders.inbox_fds]
        self._inboxes = [Post(end) for end in self._ends]
        self._inbox_end = socket.socket(fileno=orders.inbox_fd)
        self._inbox = Post(self._inbox_end, on_message=self._adopt)
        self._lag = EventLoopLagMonitor(f"shard {orders.index}", on_heartbeat=self._note_lag)

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
        self.guard.giving(cast("Arrival", arrival))
        fd = cast("Arrival", arrival).take_descriptor()
        if fd is None:
            return
        self._slot.add(Word.HANDED_OVER)
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

        isolate = self._room_for_isolated if self._orders.isolates else None
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
        others = self._board.others(self._orders.index)
        now = now_microseconds()
        roomy = [slot for slot in others if slot.room and slot.is_turning(now)]
        if self._slot.room or not roomy:
            return None
        return max(roomy, key=lambda slot: slot.room).index

    def _adopt(self, message: Message) -> None:
        """Another shard has handed a connection over."""
        if not message.fds:
            return
        connection = socket.socket(fileno=message.fds[0])
        since = message.head["since"]
        self._acceptor.open(connection, self._arrival(message.body, since))

    def _admitted(self, arrival: Waiting) -> None:
        if self._orders.isolates:
            self._isolate(cast("Arrival", arrival))
        else:
            self._serve(arrival)

    def _isolate(self, arrival: Arrival) -> None:
        self.guard.giving(arrival)
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
        slot = self._slot
        slot[Word.WATCHDOG] = now_microseconds()
        slot[Word.LAG_P50] = int(lag.p50_seconds * 1e6)
        slot[Word.LAG_P99] = int(lag.p99_seconds * 1e6)
        slot[Word.LAG_MAX] = int(lag.max_seconds * 1e6)
        slot[Word.LOOP_STATE] = _LOOP_STATES.index(lag.state)


class IsolatedSession(Process):
    """The process of one session: it serves one connection, and ends with it."""

    async def run(self, head: bytes) -> None:
        """Serve the connection until it is over, or we are told to stop."""
        await self.start()
        fd = self._orders.connection_fd
        assert fd is not None
        arrival = self._arrival(head, self._orders.since)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: arrival, socket.socket(fileno=fd))
        watching = asyncio.create_task(self._watch(arrival.transport), name="watch-connection")
        stopping = asyncio.create_task(self._stopping.wait(), name="wait-for-signal")
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        stopping.cancel()
        await self.stop()

    async def _watch(self, transport: asyncio.BaseTransport) -> None:
        """Return when the session is over, or the connection without having begun one.

        A session that was begun over HTTP has no connection of its own.
        """
        async with asyncio.timeout(BEGIN_SECONDS) as patience:
            while len(self.table) or not transport.is_closing():
                if len(self.table):
                    patience.reschedule(None)
                    await self.guard.until_over()
                await asyncio.sleep(LEAVING_LOOK_SECONDS)

    def _on_link(self, message: Message) -> None:
        """A connection for the session, which the front has accepted."""
        if not message.fds:
            return
        arrival = self._arrival(message.body, message.head["since"])
        opening = asyncio.get_running_loop().connect_accepted_socket(
            lambda: arrival, socket.socket(fileno=message.fds[0])
        )
        self._leaving.add(task := asyncio.create_task(_quietly(opening)))
        task.add_done_callback(self._leaving.discard)

    def _other_owner(self, session_id: str) -> int:
        return 0


def _most_here(orders: Orders) -> int:
    """How many sessions may be in the process itself: none where each has one of its own."""
    if orders.isolates:
        return 0
    return 1 if orders.exclusive else orders.max_sessions


async def _quietly(opening: Awaitable[Any]) -> None:
    """Open a connection; that its client has left already is nobody's fault."""
    with contextlib.suppress(OSError):
        await opening


async def run_process(
    config: HostConfig, definition: Definition, orders: Orders, board: Board, head: bytes
) -> None:
    """Be the process of these orders; `head` is what was read of an isolated one's connection."""
    kind = Shard if orders.connection_fd is None else IsolatedSession
    if orders.world is None:
        await kind(config, definition, orders, board).run(head)
        return
    link = await connect_world(orders.world, f"shard {orders.index}.{orders.generation}")
    shared = replace(definition, factory=WorldFactory(definition.factory, link))
    process = kind(config, shared, orders, board)
    link.on_lost = process.lose_world
    try:
        await process.run(head)
    finally:
        await link.close()
