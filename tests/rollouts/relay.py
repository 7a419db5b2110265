# SPDX-License-Identifier: Apache-2.0
"""A port before a server: it can go, with all connections, and come back."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Self


class Relay:
    """Passes on what comes to a port of its own."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.falls = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()
        await asyncio.gather(*self._tasks)

    def fall(self, *, back_after_seconds: float, to: int | None = None) -> None:
        """All connections are lost, and nobody answers for a while; then perhaps another server."""
        self.falls += 1
        self._to = self._to if to is None else to
        self._close()
        self._start(self._come_back(back_after_seconds))

    async def _come_back(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, reuse_address=True
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._start(self._pass_on(reader, to_writer))
        self._start(self._pass_on(to_reader, writer))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()
