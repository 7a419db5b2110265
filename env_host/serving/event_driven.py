# SPDX-License-Identifier: Apache-2.0
"""uvicorn's server without its ticks: an idle one is not woken.

uvicorn looks ten times a second whether it should exit, and renews the `date` header each
second. Here an event ends the main loop, and the header is made for the responses that need it.

Its connections are limited: `system/net/http_limits.py`, `system/net/connection_limit.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from uvicorn.server import Server, ServerState

from ...system.net.connection_limit import MAX_CONNECTIONS, ConnectionLimit, Listener
from ...system.net.http_limits import BodyLimit, Headers, HttpLimits, HttpTiming, limited

if TYPE_CHECKING:
    from uvicorn.config import Config

DRAIN_POLL_INTERVAL_SECONDS = 0.1  # between two looks whether the last connection has ended


class DatedState(ServerState):
    """State of uvicorn's protocols; its `default_headers` are of the second they are read in."""

    def __init__(self, config: Config, max_connections: int = MAX_CONNECTIONS) -> None:
        self.http_limit = ConnectionLimit(max_connections)  # of connections that others accepted
        self._config = config
        self._headers: Headers = []
        self._more: Headers = []
        self._second = 0
        super().__init__()

    @property
    def default_headers(self) -> Headers:
        """The `date` of now, and the headers of the configuration."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            date = [(b"date", formatdate(now, usegmt=True).encode())]
            self._headers = date + self._config.encoded_headers + self._more
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: Headers) -> None:
        """Ignore uvicorn's headers: without its ticks it only sets an empty list at first."""

    def close_after_answers(self) -> None:
        """Announce in each answer that the connection ends with it."""
        self._more = [(b"connection", b"close")]
        self._second = 0


class EventDrivenServer(Server):
    """uvicorn without ticks and without signal handlers, on listeners that limit connections."""

    def __init__(
        self,
        config: Config,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_body_bytes: int | None = None,
        timing: HttpTiming | None = None,
    ) -> None:
        """`max_body_bytes` limits the body of a request; None: there is no limit."""
        super().__init__(config)
        self._max_connections = max_connections
        self._max_body_bytes = max_body_bytes
        self._timing = timing
        self._listeners: list[Listener] = []
        self.server_state = self._shared = DatedState(config, max_connections)
        self._exit = asyncio.Event()
        self.on_ready: Callable[[], None] | None = None  # called when it listens

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn would raise them again and be killed by them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen."""
        config = self.config
        if not issubclass(config.http_protocol_class, HttpLimits):
            config.http_protocol_class = limited(config.http_protocol_class, self._timing)
        if self._max_body_bytes is not None:
            config.loaded_app = BodyLimit(config.loaded_app, self._max_body_bytes)
        await super().startup([])
        for each in sockets or []:
            listener = Listener(each, self._max_connections, self.make_protocol)
            listener.start()
            self._listeners.append(listener)
        if self.started and self.on_ready is not None:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and let the current requests finish."""
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)

    def make_protocol(self, limit: ConnectionLimit | None = None) -> Any:
        """Make the protocol of one accepted connection, which reports to `limit`."""
        protocol_class: Any = self.config.http_protocol_class
        protocol: Any = protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        if limit is not None:
            protocol.limit = limit
        return protocol

    async def main_loop(self) -> None:
        """Wait until `request_exit` was called."""
        await self._exit.wait()

    def close_after_answers(self) -> None:
        """Close each HTTP connection with its next answer."""
        self._shared.close_after_answers()

    def drain(self) -> None:
        """Listen no more; exit when the last connection has ended."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self.close_after_answers()
        self._exit_if_drained()

    def _exit_if_drained(self) -> None:
        if self.server_state.connections:
            asyncio.get_running_loop().call_later(
                DRAIN_POLL_INTERVAL_SECONDS, self._exit_if_drained
            )
        else:
            self.request_exit()

    def request_exit(self) -> None:
        """Make `serve` shut down and return."""
        self.should_exit = True
        self._exit.set()
