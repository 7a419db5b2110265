# SPDX-License-Identifier: Apache-2.0
"""Opens a shard's connections, reads their heads, and hands them on; reports those with sessions.

    inbox ──descriptor──▶ `Arrivals.open` ──▶ `Arrival` reads the head ──▶ on_head

A connection whose head does not arrive within `HEAD_SECONDS` is answered 408, one whose head is too
long 431. When the process has no room for another connection, those that have been silent for
longest are closed, so that clients that only connect keep no other out.

A connection is routed by its first bytes, and by session ids that name their process. Only as much
of HTTP is parsed as decides that; the server that answers the connection parses the
same bytes again, with care.

`ConnectionRegistry` tells the supervisor which connections have sessions:

    a session begins ──▶ a copy of its socket's descriptor ──▶ supervisor, which keeps it
    it ends          ──▶ its token                         ──▶ supervisor, which closes the copy
    this process exits ▶ the supervisor sends each client a notice, and closes

The changes of one iteration of the loop go in one message. A connection is not over before the
supervisor has closed its copy: microseconds later, unless it is forking. Copies are made when they
can be sent: in a crowd those that wait would take all descriptors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote_to_bytes

from ...system.net.access import split_target
from ...system.net.connection_limit import closing_answer, turn_away
from ...system.net.http_limits import MAX_HEAD_BYTES
from ...system.process.descriptors import MAX_FDS, Message
from ..ipc.fd_messages import (
    MAX_CARRIED_BYTES,
    MessageChannel,
    PeerReplicas,
    Unanswered,
    connection_message,
    duplicate,
)
from ..ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard, now_microseconds
from ..websocket.handshake import END_OF_HEAD

if TYPE_CHECKING:
    from ..serving.mcp import Give
    from ..sessions.session import Attached, Session

MCP_PATH = b"/mcp"
SESSION_PATHS = (b"/ws", MCP_PATH)

_GENERATIONS = 1 << 16

UNREAD_SECONDS = 1.0  # that a connection may seem silent because it was not checked yet
HEAD_SECONDS = 30.0  # to send a request's head
STARTING_SECONDS = 1.0  # for a further shard to start
STARTING_POLL_INTERVAL_SECONDS = 0.005

TOO_SLOW = closing_answer(HTTPStatus.REQUEST_TIMEOUT)
TOO_LONG = closing_answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

_numbers = itertools.count()

log = logging.getLogger("openenvd.env_host")


class Arrival(asyncio.Protocol):
    """A connection whose first request has not been answered, with the bytes read so far."""

    def __init__(self, arrivals: Arrivals, connection: Unanswered) -> None:
        self._arrivals = arrivals
        self.since, _, self.data, self.first_full, self.accepted = connection
        self._number = next(_numbers)
        self.is_read = bool(self.data)  # another process has read its head
        self._is_waiting = True
        self.transport: Any = None  # until the connection is open

    @property
    def place(self) -> tuple[int, int]:
        """Return where it stands among those of this process that wait, the oldest first."""
        return self.since, self._number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the head of the request, unless another process has read it."""
        self.transport = transport
        if self.is_read:
            self._route()

    def data_received(self, data: bytes) -> None:
        """Collect the head of the request, then route the connection."""
        self.data = self.data + data if self.data else data
        if self.is_read:
            if len(self.data) > MAX_HEAD_BYTES:
                self.transport.pause_reading()  # until it is answered
        elif END_OF_HEAD in self.data[: MAX_HEAD_BYTES + len(END_OF_HEAD)]:
            self.is_read = True
            self._route()
        elif len(self.data) > MAX_HEAD_BYTES:
            self.refuse(TOO_LONG)

    def _route(self) -> None:
        self._arrivals.on_head(self)
        self._arrivals.settle(self)  # last: it counts as arriving until it has a slot

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss, unless the connection was given away."""
        self._arrivals.settle(self)
        if self._is_waiting:
            self._arrivals.on_lost(self)

    def refuse(self, answer: bytes) -> None:
        """Answer a client that sent no head, or too long a one, and close."""
        if self.transport is not None:
            self._arrivals.settle(self)
            self.transport.write(answer)
            self.transport.close()

    @property
    def is_internal(self) -> bool:
        """Return whether it is one end of a pair of sockets, from another shard."""
        return not isinstance(self.transport.get_extra_info("sockname"), tuple)

    def serve_by(self, serve: Callable[[asyncio.Transport, bytes, str | None], None]) -> None:
        """Answer the connection, beginning with the bytes that were read from it."""
        if not self.transport.is_closing():
            self._is_waiting = False
            if len(self.data) > MAX_HEAD_BYTES:
                self.transport.resume_reading()
            serve(self.transport, self.data, self.accepted)

    def give_up(self, most_bytes: int | None = MAX_CARRIED_BYTES) -> Unanswered | None:
        """Give the connection up and return it for another process; None when it has ended.

        A connection of which more than `most_bytes` were read is aborted: its client has not waited
        for the answer to its handshake.
        """
        if most_bytes is not None and len(self.data) > most_bytes:
            self.transport.abort()
        if self.transport.is_closing():
            return None
        self._is_waiting = False
        fd = duplicate(self.transport)
        self.transport.abort()  # this descriptor only: the connection has another
        if fd is None:
            return None
        return Unanswered(self.since, fd, bytes(self.data), self.first_full, self.accepted)


class Arrivals:
    """The connections of one process whose heads are being read. On the event loop only."""

    def __init__(
        self,
        counters: Counters,
        on_head: Callable[[Arrival], None],
        on_lost: Callable[[Arrival], None],
    ) -> None:
        self._counters = counters
        self.on_head = on_head
        self.on_lost = on_lost
        self._silent: dict[Arrival, float] = {}  # since when it is here; the oldest first
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._silent)

    def open(self, connection: Unanswered) -> None:
        """Open a connection."""
        arrival = Arrival(self, connection)
        self._silent[arrival] = self._loop.time()
        self._counters[Field.ARRIVING] = len(self._silent)
        if self._timer is None:
            self._time_out_later()
        task = self._loop.create_task(self._open(arrival, connection.fd))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def make_room(self, count: int) -> None:
        """Close the `count` connections that have been silent for longest."""
        latest = self._loop.time() - UNREAD_SECONDS
        for arrival, since in list(itertools.islice(self._silent.items(), max(0, count))):
            if since <= latest:
                arrival.refuse(TOO_SLOW)

    def settle(self, arrival: Arrival) -> None:
        """Take note that the head of a connection has been read, or that it has ended."""
        arrival.is_read = True
        self._silent.pop(arrival, None)
        self._counters[Field.ARRIVING] = len(self._silent)

    async def _open(self, arrival: Arrival, fd: int) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: arrival, socket.socket(fileno=fd))
        except OSError:  # its client has left already
            self.settle(arrival)
            self.on_lost(arrival)

    def _time_out_later(self) -> None:
        since = next(iter(self._silent)).since
        seconds = HEAD_SECONDS - (now_microseconds() - since) / MICROSECONDS
        self._timer = self._loop.call_later(max(seconds, 1.0), self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        latest = now_microseconds() - int(HEAD_SECONDS * MICROSECONDS)
        for arrival in [each for each in self._silent if each.since <= latest]:
            arrival.refuse(TOO_SLOW)
        if self._silent:
            self._time_out_later()


@dataclass(frozen=True, slots=True)
class Head:
    """The request that a connection begins with."""

    wants_session: bool = False  # the connection begins a session of its own
    session_id: str | None = None  # it is for this session
    is_upgrade: bool = False  # to a WebSocket: all that follows is for the same session
    path: str = field(default="", compare=False)  # empty when the head is invalid


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has a session."""

    index: int  # its row of the scoreboard
    generation: int
    replica: int = 0


def read_head(data: bytes) -> Head:
    """Parse a request's head; an invalid one gives an empty `Head`."""
    line, _, rest = data.partition(b"\r\n")
    words = line.split(b" ")
    if len(words) != 3:
        return Head()
    path, query = split_target(words[1])
    if b"%" in path:
        path = unquote_to_bytes(path)  # as `parse_upgrade` does
    is_upgrade = words[0] == b"GET" and path in SESSION_PATHS and b"websocket" in rest.lower()
    session_id = None
    if b"session_id" in query:
        session_id = parse_qs(query.decode("latin-1")).get("session_id", [None])[0]
    if is_upgrade and path == MCP_PATH:
        session_id = None  # it has a session of its own, whatever its address names
    wants_session = is_upgrade and session_id is None
    return Head(wants_session, session_id, is_upgrade, path.decode("latin-1"))


def new_session_id(owner: Owner) -> str:
    """Return a random id that names its owner in its last digits."""
    x = os.urandom(9).hex()
    own = f"{owner.replica:04x}{owner.index:04x}{owner.generation % _GENERATIONS:04x}"
    # As `uuid.uuid4()` has it, in a third of the time.
    return f"{x[:8]}-{x[8:12]}-4{x[12:15]}-a{x[15:18]}-{own}"


def owner_of(session_id: str) -> Owner | None:
    """Return the owner of an id, which may have exited; None for an id from elsewhere."""
    try:
        digits = uuid.UUID(session_id).hex
    except ValueError:
        return None
    return Owner(int(digits[24:28], 16), int(digits[28:], 16), int(digits[20:24], 16))


@dataclass(eq=False, slots=True)
class OtherProcesses:
    """The other shards and replicas: which of them has a session or room, and how it gets it."""

    _scoreboard: Scoreboard
    _own: Owner
    _replicas: PeerReplicas
    _inboxes: Sequence[MessageChannel]  # of all shards, by index
    _: KW_ONLY
    shares_address: bool  # all replicas accept from the same sockets

    def process(self, session_id: str) -> int | None:
        """Return the index of the other process of this replica that has the session."""
        owner = owner_of(session_id)
        if owner is None or owner.replica != self._own.replica:
            return None
        if owner.index == self._own.index or owner.index >= len(self._scoreboard):
            return None
        counters = self._scoreboard[owner.index]
        is_there = counters.is_serving and counters[Field.GENERATION] % 2**16 == owner.generation
        return owner.index if is_there else None

    def replica(self, session_id: str) -> int | None:
        """Return the number of the other replica that may have the session."""
        owner = owner_of(session_id)
        return owner.replica if owner is not None and self._replicas.has(owner.replica) else None

    def owner_of(self, session_id: str) -> Give | None:
        """Return how to give a connection to the other process that has the session."""
        if (index := self.process(session_id)) is not None:
            return _giver(self._inboxes[index].send)
        if (replica := self.replica(session_id)) is None:
            return None
        return _giver(partial(self._replicas.send, replica))

    async def roomier(self) -> Give | None:
        """Find the shard with the most room if this one is full; wait for one that is starting."""
        others = self._scoreboard.others(self._own.index)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STARTING_SECONDS
        while not self._scoreboard[self._own.index].room:
            now = now_microseconds()
            if roomy := [row for row in others if row.room and row.is_responsive(now)]:
                return _giver(self._inboxes[max(roomy, key=lambda row: row.room).index].send)
            if all(row[Field.PID] for row in others) or loop.time() > deadline:
                break
            await asyncio.sleep(STARTING_POLL_INTERVAL_SECONDS)
        return None

    def hand_over(self, arrival: Arrival, index: int) -> None:
        """Send a connection to another shard."""
        if (connection := arrival.give_up(None)) is not None:
            self._scoreboard[self._own.index].add(Field.HANDED_OVER)
            _send(connection, self._inboxes[index].send)

    def pass_on(self, arrival: Arrival, replica: int, first_full: int | None = None) -> None:
        """Pass a connection to another replica."""
        if (connection := arrival.give_up()) is not None:
            connection = connection._replace(first_full=first_full)
            _send(connection, partial(self._replicas.send, replica))

    def ask_replica(self, arrival: Arrival) -> bool:
        """Pass a connection that finds no room here to another replica; False: none is left."""
        if not self.shares_address:
            return False
        first = self._own.replica if arrival.first_full is None else arrival.first_full
        if (number := self._replicas.next_with_room(first)) is not None:
            self.pass_on(arrival, number, first)
        return number is not None


def _giver(send: Callable[[Message], None]) -> Give:
    return lambda fd: _send(Unanswered(now_microseconds(), fd), send)


def _send(connection: Unanswered, send: Callable[[Message], None]) -> None:
    try:
        message = connection_message([connection])
    except OSError as exc:
        log.warning("a connection could not be passed to another process: %s", exc)
        turn_away(socket.socket(fileno=connection.fd))
    else:
        send(message)


FULL_SECONDS = 0.02  # until it is tried again to send what the supervisor has had no room for


class ConnectionRegistry:
    """Reports for a shard's session table which sockets have sessions."""

    def __init__(self, link: MessageChannel, owner: Owner, on_change: Callable[[], None]) -> None:
        self._link = link
        self._owner = owner
        self.on_change = on_change  # the number of sessions has changed, or a slot is free
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._tokens: dict[str, int] = {}  # by session
        self._begun: dict[int, Attached] = {}  # not reported yet
        self._ended: list[int] = []
        self._is_due = False

    def new_id(self) -> str:
        """Return a new session id that names this process."""
        return new_session_id(self._owner)

    def on_begin(self, session: Session, socket: Attached) -> None:
        """Report a session and a copy of its socket."""
        token = self._tokens[session.id] = next(self._numbers)
        self._begun[token] = socket
        self._flush_soon()

    def on_end(self, session: Session) -> None:
        """Report that a session has ended."""
        token = self._tokens.pop(session.id, None)
        if token is None:
            return
        if self._begun.pop(token, None) is None:  # otherwise the supervisor has not heard of it
            self._ended.append(token)
            self._flush_soon()

    def flush(self) -> None:
        """Report what has begun and ended since the last report."""
        self._is_due = False
        ended, self._ended = self._ended, []
        self._send(ended=ended)
        while self._begun and not self._link.is_full:
            self._send()
        if self._begun:
            self._is_due = True
            self._loop.call_later(FULL_SECONDS, self.flush)

    def _send(self, **head: Any) -> None:
        begun = [] if self._link.is_full else list(itertools.islice(self._begun.items(), MAX_FDS))
        copies = []
        for token, attached in begun:
            del self._begun[token]
            if (fd := duplicate(attached.transport)) is not None:
                copies.append((token, attached.path, fd))
        head["begun"] = [[token, path] for token, path, _ in copies]
        self._link.send(Message(head, fds=tuple(fd for _, _, fd in copies)))

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)
