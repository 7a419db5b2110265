# SPDX-License-Identifier: Apache-2.0
"""Serves an ASGI application on the inherited socket until SIGTERM.

uvicorn does HTTP, `front_door.py` says what sessions are served over. Ours are also the signals:
uvicorn would raise them again and die of them, while a host that was asked to stop exits with 0.
What sessions are told before it closes is in `process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from uvicorn.config import Config

from ..protocol import MAX_MESSAGE_BYTES
from ..sessions.keepalive import SessionWatch
from .protocol_switch import http_protocol, uvicorn_websockets, websocket_protocol
from .ws_session import Service

BACKLOG = 4096  # a burst of clients must wait in the queue, not be refused
STOP_SECONDS = 3.0  # for HTTP requests under way, when the server stops


class HostServer(uvicorn.Server):
    """uvicorn, told when to stop by us."""

    def __init__(self, app: Any, *, on_ready: Callable[[], None]) -> None:
        self._service: Service | None = getattr(app, "session_service", None)
        super().__init__(_config(app, self._service))
        self._on_ready = on_ready
        self._watching: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        if not self.started:
            return
        if self._service is not None:
            watch = SessionWatch(self._service.table)
            self._watching = asyncio.create_task(watch.run(), name="session-watch")
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        if self._watching is not None:
            self._watching.cancel()
        await super().shutdown(sockets)


class Server(HostServer):
    """HTTP and WebSockets for connections that somebody else has accepted.

    The seam between who accepts (`shard.py`) and what happens on a connection:

        await server.start() ─▶ server.make_protocol() for each connection ─▶ await server.stop()
    """

    def __init__(self, app: Any) -> None:
        super().__init__(app, on_ready=lambda: None)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the application (its lifespan); from then on connections can be served."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[])
        await self.on_tick(0)
        self._ticking = asyncio.create_task(self._tick(), name="http-date")

    def make_protocol(self) -> asyncio.Protocol:
        """What serves one accepted connection: HTTP, and WebSockets once they are asked for."""
        protocol_class: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = protocol_class(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        return protocol

    async def stop(self) -> None:
        """Let the requests under way finish, close every connection, end the application."""
        if self._ticking is not None:
            self._ticking.cancel()
        await self.shutdown(sockets=[])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.on_tick(0)  # the `date` header


async def serve(app: Any, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve an app that is none of ours, as it is, until SIGTERM or SIGINT."""
    server = HostServer(app, on_ready=on_ready)

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve(sockets=[listener])


def _config(app: Any, service: Service | None) -> Config:
    return Config(
        app,
        http="auto" if service is None else cast(Any, http_protocol(service)),
        ws=uvicorn_websockets if service is None else cast(Any, websocket_protocol(service)),
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="auto",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(STOP_SECONDS),
    )
