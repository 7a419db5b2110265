# SPDX-License-Identifier: Apache-2.0
"""`HeldRequests`: holds clients' requests to an environment without a replica until it has one.

    client ──▶ Envoy ──▶ this socket, the environment's only endpoint ──▶ waits
                 └─────▶ the replica  ◀──"503, OpenEnvd-Retry" when there is one

Envoy sends a request again when the answer says that nothing was begun, so a handshake reaches the
replica on its second attempt, and its client has only waited. Used while an environment's only
replica is restarted.

Failure cases:

* No replica becomes ready in time, or the environment goes or fails: 503 with the cause, which
  Envoy passes to the client.
* More requests wait than `MAX_HELD`, or than the descriptors allow: 503 with that cause.
* The client leaves: Envoy closes the connection, and nothing waits any more.
* The daemon exits: Envoy finds no listener at the socket, and answers 503 after its retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from itertools import islice
from pathlib import Path

from ...schema.protocol import ENVIRONMENT_HEADER, RETRY_HEADER
from ...system.net.connection_limit import (
    ConnectionLimit,
    Listener,
    closing_answer,
    connections_within,
)
from ...system.net.http_limits import MAX_HEAD_BYTES
from ...system.net.listening_sockets import BACKLOG
from ...system.process.proc import raise_fd_limit

log = logging.getLogger(__name__)

MAX_HELD = 16384  # if the limit on descriptors allows as many
HEAD_SECONDS = 10.0
_MAX_HEAD_BYTES = 2 * MAX_HEAD_BYTES  # with what the gateway adds
_MARGIN = 1024  # connections beyond those that are held, which are answered at once
_ANSWERED_AT_ONCE = 64  # held requests, before the loop gets a turn
_END_OF_HEAD = b"\r\n\r\n"

# The gateway adds this header to every request (`environments/gateway/configuration.py`).
_NAME = re.compile(rf"\r\n{ENVIRONMENT_HEADER}: *([^\r\n]+)".encode(), re.IGNORECASE)
_RETRY = closing_answer(
    HTTPStatus.SERVICE_UNAVAILABLE, "A replica is ready now.", headers=f"{RETRY_HEADER}: 1\r\n"
)
_NONE = closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, "This environment has no replica.")


class HeldRequests:
    """The socket to which Envoy sends requests without a replica. On the daemon's loop.

    Args:
        path: Where the socket is made, for its owner alone.
        until_served: Given an environment's name, waits until it has a replica; returns None, or
            why it has none. All requests of an environment share one call.
    """

    def __init__(self, path: Path, until_served: Callable[[str], Awaitable[str | None]]) -> None:
        self.path = path
        self._until_served = until_served
        self._max_held = connections_within(raise_fd_limit(), shares=2, most=MAX_HELD)
        self._listener: Listener | None = None
        self._held: dict[str, set[_Connection]] = {}  # by environment
        self._waiting: dict[str, asyncio.Task[None]] = {}  # for its replica

    @property
    def count(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._held.values()))

    async def start(self) -> None:
        """Listen, unless this has begun."""
        if self._listener is not None:
            return
        self.path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.path))
        self.path.chmod(0o600)
        listening.listen(BACKLOG)
        most, make = self._max_held + _MARGIN, partial(_Connection, self)
        self._listener = Listener(listening, most, make)
        self._listener.start()

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.close()
        listener.socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        for connection in listener.limit.open.copy():
            connection.transport.abort()
        waiting = list(self._waiting.values())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def hold(self, connection: _Connection, name: str) -> None:
        """Hold a request until it is known whether its environment gets a replica."""
        if (most := self._max_held) <= self.count:
            why = f"{name} has no replica, and no more than {most} requests can wait for one."
            connection.answer(closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, why))
            return
        self._held.setdefault(name, set()).add(connection)
        if name not in self._waiting:
            self._waiting[name] = asyncio.create_task(self._answer(name))

    def remove(self, connection: _Connection, name: str | None) -> None:
        """Drop a connection that has ended."""
        held = self._held.get(name or "", set())
        held.discard(connection)
        if not held and name in self._waiting:
            self._waiting.pop(name).cancel()

    async def _answer(self, name: str) -> None:
        try:
            why = await self._until_served(name)
        except Exception:
            log.exception("cannot wait for a replica of %s", name)
            why = f"The daemon could not wait for a replica of {name}; its log says why."
        answer = _RETRY if why is None else closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, why)
        held = self._held.pop(name, set())
        self._waiting.pop(name, None)  # requests from now on wait again
        while held:
            for connection in list(islice(held, _ANSWERED_AT_ONCE)):
                held.discard(connection)
                connection.answer(answer)
            await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    """One request from Envoy, of which only the head is read."""

    transport: asyncio.Transport

    def __init__(self, owner: HeldRequests, limit: ConnectionLimit) -> None:
        self._owner = owner
        self._limit = limit
        self._head = b""
        self._name: str | None = None
        self._is_read = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a head."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._limit.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Hold the request once its head is complete; ignore the rest."""
        if self._is_read:
            return
        self._head += data
        if _END_OF_HEAD not in self._head and len(self._head) <= _MAX_HEAD_BYTES:
            return
        self._is_read = True
        self._timer.cancel()
        self._limit.note_request(self)
        found = _NAME.search(self._head)
        self._head = b""
        if found is None:
            self.answer(_NONE)
        else:
            self._name = found[1].decode("latin-1")
            self._owner.hold(self, self._name)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop holding the request."""
        self._timer.cancel()
        self._limit.remove(self)
        self._owner.remove(self, self._name)

    def answer(self, data: bytes) -> None:
        """Send an answer, and close."""
        if not self.transport.is_closing():  # it may have left
            self.transport.write(data)
            self.transport.close()
