# SPDX-License-Identifier: Apache-2.0
"""A light client session: connects, resets, steps when it is told to, and says how it was lost."""

from __future__ import annotations

import asyncio
import json
import time

from openenvd.rollouts.bench.generator import new_socket
from openenvd.rollouts.bench.session import CLOSE_FRAME, RESET, Connection
from openenvd.schema.protocol import REPLICA_HEADER
from openenvd.system.net.websocket import unmasked_client_frame, upgrade_request

STEP = unmasked_client_frame(b'{"type":"step","data":{"wait_seconds":0.0}}')


class LightSession(Connection):
    """One session.

    Attributes:
        ended: Done when its connection is lost.
        replica: Who serves it, as the handshake said.
        told: What it was told before its connection ended: the code of an error or of a close, the
            status of a refusal, or nothing (`reset`, `eof`).
    """

    def __init__(self, authority: str, path: str) -> None:
        super().__init__(upgrade_request(authority, path))
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.replica = ""
        self.told = ""
        self._answer: asyncio.Future[None] = loop.create_future()

    def on_open(self, head: str) -> None:
        """Ask for a reset."""
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
        self.replica = headers.get(REPLICA_HEADER.lower(), "")
        self.write(RESET)

    def on_refused(self, line: str) -> None:
        """There is no session."""
        self._fail(line)

    def on_message(self, text: bytes) -> None:
        """An answer."""
        if b'"error"' in text[:40]:
            self._fail(json.loads(text)["data"]["code"])
        elif not self._answer.done():
            self._answer.set_result(None)

    def on_close(self, code: int, reason: str) -> None:
        """The server ends it; an error that came before says more."""
        self._fail(self.told or f"close {code}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever the reason: this session is over."""
        self._fail(self.told or ("reset" if exc else "eof"))
        self.ended.set_result(None)

    async def opened(self) -> None:
        """Wait for the answer to the reset."""
        await self._answer

    async def step(self, due: float) -> float:
        """Step once; returns the seconds since it was due.

        Raises:
            ConnectionError: The session is lost, or the answer was an error.
        """
        if self.ended.done():
            raise ConnectionError(self.told)
        self._answer = asyncio.get_running_loop().create_future()
        due = min(due, time.monotonic())  # a timer may be a little early
        self.write(STEP)
        await self._answer
        return time.monotonic() - due

    def end(self) -> None:
        """End the session."""
        if not self.ended.done():
            self.write(CLOSE_FRAME)
            self.close()

    def _fail(self, told: str) -> None:
        self.told = told
        if not self._answer.done():
            self._answer.set_exception(ConnectionError(told))
            self._answer.exception()  # nobody may be waiting


async def open_session(host: str, port: int, path: str, source: str = "") -> LightSession:
    """Connect, and reset; `path` is that of an environment, with its query.

    Raises:
        OSError: There is no session.
    """
    loop = asyncio.get_running_loop()
    before, mark, query = path.partition("?")
    session = LightSession(f"{host}:{port}", f"{before.rstrip('/')}/ws{mark}{query}")
    opened = new_socket(source)
    try:
        await loop.sock_connect(opened, (host, port))
        await loop.create_connection(lambda: session, sock=opened)
    except BaseException:
        opened.close()
        raise
    try:
        await session.opened()
    except BaseException:
        session.end()
        raise
    return session
