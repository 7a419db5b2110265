# SPDX-License-Identifier: Apache-2.0
"""Accepts connections of the shared socket, reads their heads, and routes them.

    shared socket ──accept, its `fair_share`──▶ `Arrival` reads the head ──▶ on_head
    inbox (from another shard) ─────────────────▶ `Arrival` that was read already ──▶ on_head

All shards wait for the same socket, and the kernel wakes all of them. A shard that should not take
the connection (it has no room while another has, or is ahead of the others) ignores the socket for
a moment; if no other shard has taken the connection by then, it takes it all the same, so that a
hung shard costs the others milliseconds, not their clients.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from ...system.descriptors import MAX_PACKET_BYTES
from ..ipc.scoreboard import Counters, Field, now_microseconds
from .request_head import END_OF_HEAD, MAX_HEAD_BYTES

BATCH = 16  # connections accepted in one go, by a shard that has few
SLACK = 8  # sessions that a shard may be ahead of the one with the fewest, or this share of its own
# A flood must be taken in fast: the kernel's queue is short (`somaxconn`), and a connection that
# finds it full comes again after 1, 3 and 7 s. An iteration of the loop may be long then.
SHARE = 1 / 16
MOST_BATCH = 256
LOOK_AWAY_SECONDS = 0.002
PATIENCE_SECONDS = 0.05  # then this shard takes a connection that no other took
FULL_SECONDS = 0.1  # to wait when there are no descriptors left
HEAD_SECONDS = 30.0  # to send a request's head
MOST_CARRIED_BYTES = MAX_PACKET_BYTES - 1024  # with a connection that goes to another process

log = logging.getLogger("openenvd.env_host")


class Arrival(asyncio.Protocol):
    """A connection whose first request has not been answered, with the bytes read so far."""

    transport: asyncio.Transport

    def __init__(
        self,
        on_head: Callable[[Arrival], None],
        on_lost: Callable[[Arrival], None],
        *,
        counters: Counters,
        data: bytes = b"",
        since: int = 0,
    ) -> None:
        self._counters = counters
        self.since = since or now_microseconds()
        self.data = bytearray(data)
        self._was_read = bool(data)
        self._on_head = on_head
        self._on_lost = on_lost
        self._timer: asyncio.TimerHandle | None = None
        self._is_waiting = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the head of the request, unless another shard has read it."""
        self.transport = cast("asyncio.Transport", transport)
        if self._was_read:
            self._on_head(self)
            return
        self._counters.add(Field.ARRIVING)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HEAD_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """Collect the head of the request, then route the connection."""
        self.data += data
        if len(self.data) > MAX_HEAD_BYTES:
            self.transport.pause_reading()  # until it is answered
        if not self._was_read and (END_OF_HEAD in self.data or len(self.data) > MAX_HEAD_BYTES):
            self._settle()
            self._on_head(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss, unless the connection was given away."""
        self._let_go()
        if not self._was_read:
            self._settle()
        if self._is_waiting:
            self._on_lost(self)

    def failed_to_open(self) -> None:
        """Report a connection that the client closed before it could be opened."""
        self._on_lost(self)

    def serve_by(self, protocol: asyncio.Protocol) -> None:
        """Give the connection to `protocol`."""
        self._let_go()
        if self.transport.is_closing():
            return
        self._is_waiting = False
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if len(self.data) > MAX_HEAD_BYTES:
            self.transport.resume_reading()
        protocol.data_received(bytes(self.data))

    def take_descriptor(self) -> int | None:
        """Give the connection up and return a descriptor of it; None when it has ended.

        The connection is aborted when its client did not wait for the answer to its handshake,
        and has sent more than fits into one message.
        """
        self._let_go()
        if len(self.data) > MOST_CARRIED_BYTES:
            self.transport.abort()
        if self.transport.is_closing():
            return None
        self._is_waiting = False
        fd = duplicate(self.transport)
        self.transport.abort()  # this descriptor only: the connection has another
        return fd

    def _settle(self) -> None:
        """Count the connection as arrived: its head was read, or it was lost."""
        self._was_read = True
        self._counters.add(Field.ARRIVING, -1)

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Acceptor:
    """Accepts one shard's share of the connections of the shared socket."""

    def __init__(
        self,
        listener: socket.socket,
        own: Counters,
        others: Sequence[Counters],
        make_arrival: Callable[[], Arrival],
    ) -> None:
        self._listener = listener
        self._family = listener.family
        self._own = own
        self._others = others
        self._make_arrival = make_arrival
        self._loop = asyncio.get_running_loop()
        self._away_since: float | None = None
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._was_full = False
        self._opening: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start accepting."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._wake)

    def stop(self) -> None:
        """Stop accepting; connections in the socket's queue are left to the other shards."""
        self._loop.remove_reader(self._listener.fileno())
        if self._timer is not None:
            self._timer.cancel()

    def open(self, connection: socket.socket, arrival: Arrival) -> None:
        """Open a connection on the loop."""
        opening = self._loop.connect_accepted_socket(lambda: arrival, connection)
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(lambda task: self._opened(task, arrival))

    def _opened(self, task: asyncio.Task[Any], arrival: Arrival) -> None:
        self._opening.discard(task)
        if not task.cancelled() and task.exception() is not None:
            arrival.failed_to_open()  # its client has left already

    def _wake(self) -> None:
        share = fair_share(self._own, self._others, now_microseconds())
        if share or self._was_patient():
            self._away_since = None
            self._accept(share or BATCH)
        else:
            self._look_away(LOOK_AWAY_SECONDS)

    def _was_patient(self) -> bool:
        """Return whether a connection has been left to the other shards for long enough."""
        now = self._loop.time()
        if self._away_since is None or now - self._looked_at > 10 * LOOK_AWAY_SECONDS:
            self._away_since = now
        self._looked_at = now
        return now - self._away_since >= PATIENCE_SECONDS

    def _accept(self, most: int) -> None:
        fds = list(self._accept_some(most))
        self._own.add(Field.CONNECTIONS, len(fds))
        for fd in fds:
            connection = socket.socket(self._family, socket.SOCK_STREAM, 0, fd)
            self.open(connection, self._make_arrival())

    def _accept_some(self, most: int) -> Iterator[int]:
        for _ in range(most):
            try:
                # What `accept` does, without its asking the listener for its family each time.
                fd, _ = self._listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._warn_full(exc)
                self._look_away(FULL_SECONDS)
                return
            self._was_full = False
            yield fd

    def _look_away(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(seconds, self.start)

    def _warn_full(self, exc: OSError) -> None:
        if not self._was_full:
            self._was_full = True
            fields = {"shard": self._own.index}
            log.warning("no more connections can be accepted for now: %s", exc, extra=fields)


def fair_share(own: Counters, others: Sequence[Counters], now: int) -> int:
    """Return how many connections this shard should accept now, and not leave to the others."""
    roomy = [counters.load for counters in others if counters.room and counters.is_responsive(now)]
    batch = min(MOST_BATCH, max(BATCH, int(own.load * SHARE)))
    if not roomy:
        return batch  # also when all are full: HTTP is answered, and sessions wait their turn
    ahead = own.load - min(roomy)
    return max(0, min(batch, own.room, max(SLACK, batch - BATCH) + 1 - ahead))


def duplicate(transport: asyncio.BaseTransport) -> int | None:
    """Duplicate the descriptor of a transport's socket; None when it has none."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return None
    try:
        return os.dup(connection.fileno())
    except OSError:
        return None
