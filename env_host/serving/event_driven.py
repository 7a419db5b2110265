# SPDX-License-Identifier: Apache-2.0
"""uvicorn's server without its ticks: an idle one is not woken.

uvicorn looks ten times a second whether it should exit, and makes the `date` header anew each
second. Here an event ends the main loop, and the header is made for the responses that need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import TYPE_CHECKING

from uvicorn.server import Server, ServerState

if TYPE_CHECKING:
    from uvicorn.config import Config

Headers = list[tuple[bytes, bytes]]


class DatedState(ServerState):
    """What uvicorn's protocols share; its `default_headers` are of the second they are read in."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._headers: Headers = []
        self._second = 0
        super().__init__()

    @property
    def default_headers(self) -> Headers:
        """The `date` of now, and the headers of the configuration."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            date = [(b"date", formatdate(now, usegmt=True).encode())]
            self._headers = date + self._config.encoded_headers
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: Headers) -> None:
        """Ignore uvicorn's own: it sets none without its ticks but the empty list at first."""


class EventDrivenServer(Server):
    """uvicorn without ticks and without signal handlers."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.server_state = DatedState(config)
        self._exit = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn would raise them again and be killed by them."""
        yield

    async def main_loop(self) -> None:
        """Wait until `request_exit` was called."""
        await self._exit.wait()

    def request_exit(self) -> None:
        """Let `serve` shut down and return."""
        self.should_exit = True
        self._exit.set()
