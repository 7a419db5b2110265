# SPDX-License-Identifier: Apache-2.0
"""Serves connections with uvicorn, except sessions on `/ws` and `/mcp`, which need less.

    connection ─first head─▶ `serve_connection` ─a handshake of these─▶ SessionSocket or McpSocket
                                   └─────────anything else─────────▶ uvicorn's HTTP protocol

A session costs uvicorn's HTTP protocol a third of its time and more than half of its memory, so
its handshake is found first. Uvicorn answers or refuses everything that is not plainly one.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ...schema.protocol import HostConfig
from ...system.net.connection_limit import FULL_ANSWER, connections_within
from ...system.net.http_limits import MAX_HEAD_BYTES, limited
from ...system.process.signal_pipe import DRAIN_SIGNALS, STOP_SIGNALS, take_over
from ..sessions.session import SessionWatch
from ..websocket.handshake import END_OF_HEAD, Upgrade, acceptance, parse_upgrade
from .access import Access, AccessGuard
from .app import HostApp
from .event_driven import EventDrivenServer
from .mcp import McpSocket
from .own_app import KeptConnection, try_handshake
from .ws_session import SessionSocket

BACKLOG = 4096  # a burst of clients must wait in the queue, not be refused
STOP_SECONDS = 3.0  # for HTTP requests under way, when the server stops
_KeptHttp: Any = type("KeptHttp", (KeptConnection, limited(AutoHTTPProtocol)), {})


class Server(EventDrivenServer):
    """uvicorn, on connections that the shard has accepted, or on sockets (`serve`).

    The seam between taking connections (`shard/connections.py`) and what happens on a connection:

        await start() ─▶ serve_connection(…) for each ─▶ await stop()
    """

    def __init__(self, app: Any, config: HostConfig, *, runs_hooks: bool = True) -> None:
        """Answer with `app`: a `HostApp`, or a project's own, whose sessions are its own, too."""
        self._access = Access(config)
        if isinstance(app, HostApp):
            self._routing, self._service = app.routing, app.session_service
        fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().__init__(
            Config(
                AccessGuard(app, self._access),
                http=_KeptHttp,
                ws=WebSocketsSansIOProtocol,
                ws_max_size=config.max_message_bytes,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws_per_message_deflate=False,
                lifespan="auto" if runs_hooks else "off",
                headers=list(config.headers.items()),
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=int(STOP_SECONDS),
            ),
            max_connections=connections_within(fds, shares=2),  # WebSockets have the other
            max_body_bytes=config.max_message_bytes,
        )
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the application (its lifespan); from then on connections can be served."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[])
        if self.config.lifespan == "auto" and self._service.checks_handshakes:
            await try_handshake(self._service.table.definition.app)
        watch = SessionWatch(self._service.table)
        self._watch = asyncio.create_task(watch.run(), name="session-watch")

    def permitted(self, head: bytes) -> Upgrade | None:
        """Return the handshake in `head` if it may begin a session."""
        upgrade = parse_upgrade(head)
        return upgrade if upgrade is not None and self._access.permits(upgrade) else None

    def serve_connection(
        self, transport: asyncio.Transport, data: bytes, accepted: str | None
    ) -> None:
        """Answer a connection of which `data` was read: with a session, or as uvicorn does.

        `accepted`: the project's middleware has accepted its handshake, with these header lines.
        """
        service, end = self._service, data.find(END_OF_HEAD) + len(END_OF_HEAD)
        upgrade = None
        is_checked = accepted is not None or not service.checks_handshakes
        if is_checked and b"websocket" in data[:end].lower():
            upgrade = self.permitted(data[:end])
        if upgrade and upgrade.path in service.paths:
            kind = SessionSocket if upgrade.path == SessionSocket.path else McpSocket
            opened = kind(service, self.server_state.connections)
            opened.connection_made(transport)
            lines = service.headers + (accepted or "").encode("latin-1")
            transport.write(acceptance(upgrade, lines))
            opened.begin(upgrade.parameter("session_id") if upgrade.query else None)
            transport.set_protocol(opened)
            if len(data) > end:
                opened.data_received(data[end:])
        elif (limit := self._shared.http_limit).reserve():
            http = self.make_protocol(limit)
            http.routing = self._routing
            http.connection_made(transport)
            transport.set_protocol(http)
            http.data_received(data)
        else:
            transport.write(FULL_ANSWER)
            transport.close()

    async def stop(self) -> None:
        """Finish the current requests, close every connection, stop the application."""
        if self._watch is not None:
            self._watch.cancel()
        await self.shutdown(sockets=[])


async def serve(
    app: Any,
    listeners: list[socket.socket],
    config: HostConfig,
    *,
    on_ready: Callable[[], None],
    report: Callable[..., None],
) -> None:
    """Serve a project's own app as it is, until SIGTERM or SIGINT; `report` to the shim.

    At SIGUSR1 and SIGUSR2 it is drained: the sockets are closed, and it ends with the last
    connection.
    """

    def drain() -> None:
        server.drain()
        for listener in listeners:
            listener.close()
        report(draining=True)

    def stop(number: int) -> None:
        report(stopped_by=number)
        server.request_exit()

    server = Server(app, config)
    server.on_ready = on_ready
    loop = asyncio.get_running_loop()
    take_over(STOP_SIGNALS, lambda n: loop.add_signal_handler(n, stop, n))
    take_over(DRAIN_SIGNALS, lambda n: loop.add_signal_handler(n, drain))
    await server.serve(sockets=listeners)
