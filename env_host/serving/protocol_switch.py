# SPDX-License-Identifier: Apache-2.0
"""What a new connection is: a session, or something for uvicorn.

    connection ──first bytes──▶ FrontDoor ──`GET /ws`, a handshake──▶ SessionSocket
                                    └──────anything else────────────▶ uvicorn's HTTP protocol
                                               later an upgrade ─────▶ UpgradeDoor ──/ws──▶ the same
                                                                           └──else──▶ uvicorn's own

A session costs uvicorn's HTTP protocol a third of its time and more than half of its memory, so
the doors look first; what they do not plainly recognise is uvicorn's to answer, or to refuse.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from ..websocket.handshake import END_OF_HEAD, MAX_HEAD_BYTES, Upgrade, acceptance, parse_upgrade
from .ws_session import Service, SessionSocket

SESSION_PATH = "/ws"
_BEGINNINGS = (b"GET /ws ", b"GET /ws?")

HttpFactory = Callable[[], Any]


def _uvicorn_websockets() -> Any:
    """uvicorn's protocol for WebSockets: the sans-I/O one where it has it (0.35)."""
    name, kind = "uvicorn.protocols.websockets.websockets_sansio_impl", "WebSocketsSansIOProtocol"
    if importlib.util.find_spec(name) is None:
        name, kind = "uvicorn.protocols.websockets.websockets_impl", "WebSocketProtocol"
    return getattr(importlib.import_module(name), kind)


# Here, so that a process that imports this and forks has loaded them for all.
_http: Any = importlib.import_module("uvicorn.protocols.http.auto").AutoHTTPProtocol
uvicorn_websockets: Any = _uvicorn_websockets()


class FrontDoor(asyncio.Protocol):
    """A connection until its first request's head is there."""

    __slots__ = ("_connections", "_head", "_make_http", "_service", "_transport")

    def __init__(self, service: Service, make_http: HttpFactory, connections: set[Any]) -> None:
        self._service = service
        self._make_http = make_http
        self._connections = connections
        self._transport: Any = None
        self._head = b""

    def connection_made(self, transport: Any) -> None:
        """Wait for what it says."""
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has said nothing of interest."""
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Decide, once there is enough of it."""
        head = self._head = self._head + data if self._head else data
        if not head.startswith(_BEGINNINGS):
            if not any(beginning.startswith(head) for beginning in _BEGINNINGS):
                self._leave_to_uvicorn()
            return
        end = head.find(END_OF_HEAD)
        if end < 0:
            if len(head) > MAX_HEAD_BYTES:
                self._leave_to_uvicorn()
            return
        end += len(END_OF_HEAD)
        upgrade = parse_upgrade(head[:end])
        if upgrade is None or upgrade.path != SESSION_PATH:
            self._leave_to_uvicorn()
            return
        self._connections.discard(self)
        socket = open_session(self._service, upgrade, self._transport, self._connections)
        self._transport.set_protocol(socket)
        if len(head) > end:
            socket.data_received(head[end:])

    def shutdown(self) -> None:
        """The server stops (uvicorn's word for it)."""
        self._transport.close()

    def _leave_to_uvicorn(self) -> None:
        self._connections.discard(self)
        http = self._make_http()
        http.connection_made(self._transport)
        self._transport.set_protocol(http)
        http.data_received(self._head)


class UpgradeDoor(asyncio.Protocol):
    """A connection that uvicorn has read a WebSocket's handshake from.

    uvicorn makes it its transport's protocol only after it was given the head, so it cannot make
    way for another; it passes on what it is told instead.
    """

    def __init__(self, service: Service, make_other: HttpFactory, connections: set[Any]) -> None:
        self._service = service
        self._make_other = make_other
        self._connections = connections
        self._transport: Any = None
        self._real: Any = None

    def connection_made(self, transport: Any) -> None:
        """The head is about to come."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """The head, then the rest."""
        if self._real is not None:
            self._real.data_received(data)
            return
        upgrade = parse_upgrade(data)
        if upgrade is not None and upgrade.path == SESSION_PATH:
            self._real = open_session(self._service, upgrade, self._transport, self._connections)
            return
        self._real = self._make_other()
        self._real.connection_made(self._transport)
        self._real.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        result: bool | None = self._real.eof_received()
        return result

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._real.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._real.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._real.resume_writing()


class CountedSessionSocket(SessionSocket):
    """A session's socket among uvicorn's connections, which it waits for when it stops."""

    __slots__ = ("_connections",)

    def __init__(self, service: Service, connections: set[Any]) -> None:
        super().__init__(service)
        self._connections = connections
        connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of it."""
        self._connections.discard(self)
        super().connection_lost(exc)


def open_session(
    service: Service, upgrade: Upgrade, transport: Any, connections: set[Any]
) -> SessionSocket:
    """Answer the handshake and begin the session."""
    socket = CountedSessionSocket(service, connections)
    socket.connection_made(transport)
    transport.write(acceptance(upgrade))
    socket.begin(upgrade.parameter("session_id"))
    return socket


def http_protocol(service: Service) -> Callable[..., FrontDoor]:
    """What uvicorn is to take for its HTTP protocol."""

    def make(**given: Any) -> FrontDoor:
        connections = given["server_state"].connections
        return FrontDoor(service, lambda: _http(**given), connections)

    return make


def websocket_protocol(service: Service) -> Callable[..., UpgradeDoor]:
    """What uvicorn is to take for its WebSocket protocol."""

    def make(**given: Any) -> UpgradeDoor:
        connections = given["server_state"].connections
        return UpgradeDoor(service, lambda: uvicorn_websockets(**given), connections)

    return make
