# SPDX-License-Identifier: Apache-2.0
"""Accepts connections up to a limit, so that silent ones cannot keep others out.

    listener ─▶ Listener ─▶ ConnectionLimit.reserve ─┬─▶ opened
                                                       └─▶ 503: every connection has a request

A connection beyond the limit replaces the one that has been idle for longest. This module accepts
connections itself because asyncio's own servers, above all uvloop's, accept the whole kernel queue
at once, until no descriptors are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

RESERVED_FDS = 128  # for everything but connections: pipes, files, libraries
MAX_CONNECTIONS = 8192  # of one listener
MIN_CONNECTIONS = 16
BATCH = 32  # accepted at once: the connections that they replace are closed only after that
FULL_SECONDS = 0.1  # to wait when there are no descriptors left
FULL = "There is no room for another connection."
RETRY_AFTER_SECONDS = 1

log = logging.getLogger(__name__)


def connections_within(fds: int, shares: int, most: int = MAX_CONNECTIONS) -> int:
    """Return how many connections fit into one of `shares` equal parts of the descriptors."""
    if fds < 0:  # no limit
        return most
    return max(MIN_CONNECTIONS, min(most, (fds - RESERVED_FDS) // shares))


class ConnectionLimit:
    """The connections of one listener, at most `most`: protocols that have a `transport`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reserved = 0  # accepted, and not opened yet
        self.open: set[Any] = set()
        self._idle: dict[Any, None] = {}  # connections without a request, the oldest first

    def has_room(self) -> bool:
        """Return whether `reserve` would succeed now."""
        return len(self.open) + self._reserved < self._most or bool(self._idle)

    def reserve(self) -> bool:
        """Reserve room for one more connection, if possible; `add` or `give_back` must follow.

        Closes the connection that has been idle for longest if that makes room.
        """
        if not self.has_room():
            return False
        if len(self.open) + self._reserved >= self._most:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.transport.abort()
        self._reserved += 1
        return True

    def give_back(self) -> None:
        """Record that what was reserved was not opened."""
        self._reserved -= 1

    def add(self, connection: Any) -> None:
        """Add an opened connection, which is idle."""
        self._reserved -= 1
        self.open.add(connection)
        self._idle[connection] = None

    def remove(self, connection: Any) -> None:
        """Remove a connection."""
        self.open.discard(connection)
        self._idle.pop(connection, None)

    def note_request(self, connection: Any) -> None:
        """Record that the connection has a request."""
        self._idle.pop(connection, None)

    def note_idle(self, connection: Any) -> None:
        """Record that the connection's request has been answered."""
        if connection in self.open:
            self._idle[connection] = None


class Listener:
    """Accepts connections of one socket on the loop, up to their limit."""

    def __init__(
        self,
        listener: socket.socket,
        most: int,
        make_protocol: Callable[[ConnectionLimit], asyncio.BaseProtocol],
    ) -> None:
        """`make_protocol` makes a protocol that reports to the limit, at most `most` of them."""
        self.socket = listener
        self.limit = ConnectionLimit(most)
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        self.socket.setblocking(False)
        self._loop.add_reader(self.socket.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; the socket stays open."""
        self._loop.remove_reader(self.socket.fileno())
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self) -> None:
        for _ in range(BATCH):
            # A connection that is being opened cannot be closed yet. Once it is open and idle, the
            # next one takes its place instead of being turned away.
            if self._opening and not self.limit.has_room():
                return
            try:
                accepted, _address = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                log.warning("no more connections can be accepted for now: %s", exc)
                self._loop.remove_reader(self.socket.fileno())
                self._timer = self._loop.call_later(FULL_SECONDS, self.start)
                return
            accepted.setblocking(False)
            if self.limit.reserve():
                task = self._loop.create_task(self._open(accepted))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            else:
                turn_away(accepted)

    async def _open(self, accepted: socket.socket) -> None:
        protocol = self._make_protocol(self.limit)
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted)
        except OSError:  # its client has left already
            self.limit.give_back()
            accepted.close()


def closing_answer(status: HTTPStatus, detail: str | None = None, *, headers: str = "") -> bytes:
    """Return an HTTP answer that closes; 503 says when to retry. `headers` have their line ends."""
    body = json.dumps({"detail": detail or status.phrase})
    retry = ""
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        retry = f"Retry-After: {RETRY_AFTER_SECONDS}\r\n"
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry}{headers}Connection: close\r\n\r\n{body}"
    ).encode()


FULL_ANSWER = closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, FULL)


def turn_away(accepted: socket.socket) -> None:
    """Answer that there is no room, without reading the request."""
    with accepted, contextlib.suppress(OSError):  # it may have left
        accepted.send(FULL_ANSWER)
