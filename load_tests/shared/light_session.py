# SPDX-License-Identifier: Apache-2.0
"""A light client session: connects, resets, steps when it is told to, and says how it was lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from openenvd.bench.generator import new_socket
from openenvd.env_host.protocol import REPLICA_HEADER
from openenvd.system.websocket import (
    CLOSE,
    FIN,
    NORMAL_CLOSE,
    PING,
    PONG,
    TEXT,
    close_payload,
    parse_head,
    unmasked_client_frame,
    upgrade_request,
)

RESET = unmasked_client_frame(b'{"type":"reset","data":{}}')
STEP = unmasked_client_frame(b'{"type":"step","data":{"wait_seconds":0.0}}')


class LightSession(asyncio.Protocol):
    """One session.

    Attributes:
        ended: Done when its connection is lost.
        replica: Who serves it, as the handshake said.
        told: What it was told before its connection ended: the code of an error or of a close, the
            status of a refusal, or nothing (`reset`, `eof`).
    """

    def __init__(self, authority: str, path: str) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.replica = ""
        self.told = ""
        self._answer: asyncio.Future[None] = loop.create_future()
        self._opening = upgrade_request(authority, path)
        self._transport: Any = None
        self._unread = b""
        self._is_open = False

    def connection_made(self, transport: Any) -> None:
        """Ask for the upgrade."""
        self._transport = transport
        transport.write(self._opening)

    def data_received(self, data: bytes) -> None:
        """Read the answer to the upgrade, then frames."""
        self._unread += data
        if not self._is_open and not self._read_handshake():
            return
        while (head := parse_head(self._unread)) is not None and head[3] <= len(self._unread):
            kind, _, begin, end = head
            payload, self._unread = self._unread[begin:end], self._unread[end:]
            self._on_frame(kind, payload)

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
        self._transport.write(STEP)
        await self._answer
        return time.monotonic() - due

    def close(self) -> None:
        """End the session."""
        if not self.ended.done():
            self._transport.write(unmasked_client_frame(close_payload(NORMAL_CLOSE), CLOSE))
            self._transport.close()

    def _read_handshake(self) -> bool:
        head, end, rest = self._unread.partition(b"\r\n\r\n")
        if not end:
            return False
        lines = head.decode("latin-1").split("\r\n")
        if not lines[0].startswith("HTTP/1.1 101"):
            self._fail(lines[0])
            self._transport.close()
            return False
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        self.replica = headers.get(REPLICA_HEADER.lower(), "")
        self._is_open, self._unread = True, rest
        self._transport.write(RESET)
        return True

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == FIN | PING:
            self._transport.write(unmasked_client_frame(payload, PONG))
        elif kind == FIN | CLOSE:
            self._fail(self.told or f"close {int.from_bytes(payload[:2], 'big')}")
        elif kind == FIN | TEXT and b'"error"' in payload[:40]:
            self._fail(json.loads(payload)["data"]["code"])
        elif kind == FIN | TEXT and not self._answer.done():
            self._answer.set_result(None)

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
    make: Callable[[], LightSession] = lambda: LightSession(  # noqa: E731
        f"{host}:{port}", f"{before.rstrip('/')}/ws{mark}{query}"
    )
    opened = new_socket(source)
    try:
        await loop.sock_connect(opened, (host, port))
        _, session = await loop.create_connection(make, sock=opened)
    except BaseException:
        opened.close()
        raise
    try:
        await session.opened()
    except BaseException:
        session.close()
        raise
    return session
