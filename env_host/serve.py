# SPDX-License-Identifier: Apache-2.0
"""Serves an ASGI application on the inherited socket until SIGTERM.

uvicorn does HTTP and the WebSocket handshake. Ours are the signals (uvicorn would raise them again
and die of them, while a host that was asked to stop exits with 0) and what happens before it
closes: sessions are told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.config import Config

from .protocol import MAX_MESSAGE_BYTES

BACKLOG = 4096  # a burst of clients must wait in the queue, not be refused
STOP_SECONDS = 3.0  # for sessions to close their environments, and again for HTTP requests

log = logging.getLogger("openenvd.env_host")


class HostServer(uvicorn.Server):
    """uvicorn, told when to stop by us."""

    def __init__(self, config: Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()


async def serve(
    app: Any,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    on_stop: Callable[[], Awaitable[None]],
) -> None:
    """Serve until SIGTERM or SIGINT; then call `on_stop`, which has `STOP_SECONDS`, and end."""
    server = HostServer(_config(app), on_ready=on_ready)
    stopping = _on_signal(server, on_stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        stopping.cancel()


def run_loop(main: Awaitable[None], on_end: Callable[[], None]) -> None:
    """Run `main` on the fastest event loop there is; `on_end` before the loop is taken down."""
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop

    async def run() -> None:
        await main

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
        on_end()


def _config(app: Any) -> Config:
    return Config(
        app,
        http="auto",
        ws=_websocket_protocol(),
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="auto",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(STOP_SECONDS),
    )


def _websocket_protocol() -> Any:
    """The sans-I/O one where uvicorn has it (0.35): less memory and time per frame."""
    modern = importlib.util.find_spec("uvicorn.protocols.websockets.websockets_sansio_impl")
    return "websockets-sansio" if modern is not None else "websockets"


def _on_signal(server: HostServer, on_stop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """A task that waits for a signal and stops the server."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)

    async def stop() -> None:
        await asked.wait()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await on_stop()
        except TimeoutError:
            log.warning("some environments did not close within %g s", STOP_SECONDS)
        finally:
            server.should_exit = True

    return loop.create_task(stop(), name="stop-on-signal")
