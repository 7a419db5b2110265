# SPDX-License-Identifier: Apache-2.0
"""Serves connections with uvicorn, except sessions on `/ws` and `/mcp`, which need less.

    connection ─first bytes─▶ ProtocolSwitch ─a handshake of these─▶ SessionSocket or McpSocket
                                   └─────────anything else─────────▶ uvicorn's HTTP protocol
                                       later an upgrade ───▶ UpgradeSwitch ─of these─▶ as above
                                                                   └─else─▶ uvicorn's own

A session costs uvicorn's HTTP protocol a third of its time and more than half of its memory, so
the switches look first; what they do not plainly recognise is uvicorn's to answer or to refuse.

"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ...schema.protocol import MAX_MESSAGE_BYTES
from ...system.net.connection_limit import ConnectionLimit, connections_within, full_answer
from ...system.net.http_limits import MAX_HEAD_BYTES, Headers, limited
from ...system.process.signal_pipe import DRAIN_SIGNALS, STOP_SIGNALS, take_over
from ..sessions.session import SessionWatch
from ..websocket.handshake import END_OF_HEAD, Upgrade, acceptance, parse_upgrade
from .access import Access, AccessGuard
from .app import HostApp
from .event_driven import EventDrivenServer
from .mcp import McpSocket
from .own_app import Home, KeptConnection, check_handshake
from .ws_session import SessionService, SessionSocket

BACKLOG = 4096  # a burst of clients must wait in the queue, not be refused
STOP_SECONDS = 3.0  # for HTTP requests under way, when the server stops
LimitedHttp = type("KeptHttp", (KeptConnection, limited(AutoHTTPProtocol)), {})
_BEGINNINGS = (b"GET /ws ", b"GET /ws?", b"GET /mcp ", b"GET /mcp?", b"GET /?token=")


class Server(EventDrivenServer):
    """uvicorn, on connections that the shard has accepted, or on sockets (`serve`).

    The seam between taking connections (`shard/connections.py`) and what happens on a connection:

        await server.start() ─▶ server.make_protocol() for each connection ─▶ await server.stop()
    """

    def __init__(
        self,
        app: Any,
        access: Access,
        *,
        headers: Mapping[str, str],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        runs_hooks: bool = True,
    ) -> None:
        """Answer with `app`: a `HostApp`, or a project's own, whose sessions are its own, too.

        `headers` are those of every answer; a project's hooks (lifespan) are run once.
        """
        self._access = access
        http: Any = AutoHTTPProtocol
        ws: Any = WebSocketsSansIOProtocol
        if isinstance(app, HostApp):
            lines = tuple(
                (name.encode(), value.encode("latin-1")) for name, value in headers.items()
            )
            self._service = replace(app.session_service, headers=lines)
            http = partial(ProtocolSwitch, self._service, access, app.home)
            ws = partial(UpgradeSwitch, self._service, access)
        fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().__init__(
            Config(
                AccessGuard(app, access),
                http=http,
                ws=ws,
                ws_max_size=max_message_bytes,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws_per_message_deflate=False,
                lifespan="auto" if runs_hooks else "off",
                headers=list(headers.items()),
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=int(STOP_SECONDS),
            ),
            max_connections=connections_within(fds, shares=2),  # WebSockets have the other
            max_body_bytes=max_message_bytes,
        )
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the application (its lifespan); from then on connections can be served."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[])
        watch = SessionWatch(self._service.table)
        self._watch = asyncio.create_task(watch.run(), name="session-watch")

    def permits(self, head: bytes) -> bool:
        """Return whether a handshake may begin a session; if not, refuse the connection."""
        upgrade = parse_upgrade(head)
        return upgrade is not None and self._access.permits(upgrade)

    async def check(self, head: bytes, transport: asyncio.Transport) -> Headers | bytes:
        """Ask the project's middleware about a handshake that is permitted here.

        Returns:
            Further headers of the answer, which `accepted` takes; or the answer that refuses it.
        """
        upgrade = parse_upgrade(head)
        assert upgrade is not None
        return await check_handshake(self._service.table.definition.app, upgrade, transport)

    def accepted(self, headers: Headers) -> asyncio.Protocol:
        """Return what answers a connection whose handshake the project's middleware accepted."""
        protocol: Any = self.make_protocol()
        protocol.accepted = headers
        made: asyncio.Protocol = protocol
        return made

    @property
    def open_connections(self) -> int:
        """Return how many connections it answers."""
        return len(self.server_state.connections)

    async def stop(self) -> None:
        """Finish the current requests, close every connection, stop the application."""
        if self._watch is not None:
            self._watch.cancel()
        await self.shutdown(sockets=[])


async def serve(
    app: Any,
    listeners: list[socket.socket],
    *,
    access: Access,
    headers: Mapping[str, str],
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    on_ready: Callable[[], None],
    on_draining: Callable[[], None],
) -> None:
    """Serve a project's own app as it is, until SIGTERM or SIGINT.

    At SIGUSR1 and SIGUSR2 it is drained: the sockets are closed, and it ends with the last
    connection.
    """

    def drain() -> None:
        server.drain()
        for listener in listeners:
            listener.close()
        on_draining()

    server = Server(app, access, headers=headers, max_message_bytes=max_message_bytes)
    server.on_ready = on_ready
    loop = asyncio.get_running_loop()
    take_over(STOP_SIGNALS, lambda n: loop.add_signal_handler(n, server.request_exit))
    take_over(DRAIN_SIGNALS, lambda n: loop.add_signal_handler(n, drain))
    await server.serve(sockets=listeners)


class ProtocolSwitch(asyncio.Protocol):
    """A connection until the head of its first request has arrived."""

    def __init__(
        self, service: SessionService, access: Access, home: Home | None, **given: Any
    ) -> None:
        """Take what uvicorn gives its HTTP protocol."""
        # The headers that the project's middleware accepted the handshake with.
        self.accepted: Headers | None = None
        self._home = home
        self._service = service
        self._access = access
        self._given = given
        self._connections: set[Any] = given["server_state"].connections
        self._transport: Any = None
        self._head = b""

    def connection_made(self, transport: Any) -> None:
        """Wait for the head."""
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the connection, which has not sent a whole head."""
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Decide, once there is enough of the head."""
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
        upgrade = permitted_upgrade(head[:end], self._service, self._access)
        if upgrade is None or (self._service.checks_handshakes and self.accepted is None):
            self._leave_to_uvicorn()
            return
        self._connections.discard(self)
        headers = self.accepted or ()
        socket = open_session(self._service, upgrade, self._transport, self._connections, headers)
        self._transport.set_protocol(socket)
        if len(head) > end:
            socket.data_received(head[end:])

    def shutdown(self) -> None:
        """Close: uvicorn calls this when it stops."""
        self._transport.close()

    def _leave_to_uvicorn(self) -> None:
        self._connections.discard(self)
        limit: ConnectionLimit = self._given["server_state"].http_limit
        if not limit.reserve():
            self._transport.write(full_answer())
            self._transport.close()
            return
        http: Any = LimitedHttp(**self._given)
        http.limit = limit
        http.home = self._home
        http.connection_made(self._transport)
        self._transport.set_protocol(http)
        http.data_received(self._head)


class UpgradeSwitch:
    """A connection that uvicorn has read a WebSocket's handshake from.

    uvicorn makes it the transport's protocol only after it was given the head, so it cannot put
    another in its own place; it forwards each call but `data_received` to that instead.
    """

    def __init__(self, service: SessionService, access: Access, **given: Any) -> None:
        """Take what uvicorn gives its WebSocket protocol."""
        self._service = service
        self._access = access
        self._given = given
        self._transport: Any = None
        self._real: Any = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the head, which uvicorn sends at once."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decide by the head; forward the rest."""
        if self._real is not None:
            self._real.data_received(data)
            return
        upgrade = permitted_upgrade(data, self._service, self._access)
        if upgrade is not None and not self._service.checks_handshakes:
            connections = self._given["server_state"].connections
            self._real = open_session(self._service, upgrade, self._transport, connections)
            return
        self._real = WebSocketsSansIOProtocol(**self._given)
        self._real.connection_made(self._transport)
        self._real.data_received(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def permitted_upgrade(head: bytes, service: SessionService, access: Access) -> Upgrade | None:
    """Parse a handshake that may begin a session here; any other is the application's to refuse."""
    upgrade = parse_upgrade(head)
    if upgrade is None or upgrade.path not in service.paths or not access.permits(upgrade):
        return None
    return upgrade


def open_session(
    service: SessionService,
    upgrade: Upgrade,
    transport: Any,
    connections: set[Any],
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> SessionSocket:
    """Answer the handshake and begin the session."""
    kind = SessionSocket if upgrade.path == SessionSocket.path else McpSocket
    socket = kind(service, connections)
    socket.connection_made(transport)
    transport.write(acceptance(upgrade, (*service.headers, *headers)))
    socket.begin(upgrade.parameter("session_id"))
    return socket
