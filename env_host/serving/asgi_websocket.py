# SPDX-License-Identifier: Apache-2.0
"""One WebSocket through ASGI: what `/mcp` is served over. The hot path, `/ws`, needs no ASGI.

One frame is always being read ahead. Its arrival is how a client that leaves in the middle of a
call is noticed at once; its answer waits until the call is done, so that calls never overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from ...system.websocket import NORMAL_CLOSE
from ..errors import SessionEnded, SessionError

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class ClientLeft(Exception):
    """The client has closed the connection."""


class SocketDoor:
    """One WebSocket: accepting, reading ahead, waiting, ending. Knows no messages."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._incoming: asyncio.Task[dict[str, Any]] | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._over: ClientLeft | SessionEnded | None = None

    @property
    def path(self) -> str:
        """Of its address."""
        return str(self._scope["path"])

    @property
    def transport(self) -> Any:
        """The connection's transport: uvicorn's `send` is a method of the protocol that has it."""
        return getattr(getattr(self._send, "__self__", None), "transport", None)

    def query(self, name: str) -> str | None:
        """A parameter of the address."""
        found = parse_qs(self._scope.get("query_string", b"").decode("latin-1")).get(name)
        return found[0] if found else None

    def end(self, reason: ClientLeft | SessionEnded) -> None:
        """Interrupt whatever is being waited for; the first reason counts."""
        self._over = self._over or reason
        if self._waiting is not None:
            self._waiting.cancel()

    async def accept(self) -> None:
        """Complete the handshake and begin to read ahead."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        self._read_ahead()

    async def next_text(self) -> str:
        """The next text frame.

        Raises:
            ClientLeft, SessionEnded: there will be none.
            SessionError: the frame is binary.
        """
        assert self._incoming is not None
        message = await self.wait(self._incoming)
        if message["type"] == "websocket.disconnect":
            raise ClientLeft
        self._read_ahead()
        text: str | None = message.get("text")
        if text is None:
            raise SessionError("Expected a text frame, got a binary one")
        return text

    async def wait(self, call: asyncio.Future[Any]) -> Any:
        """The result of `call`, which is cancelled when the client leaves or `end` is called.

        Raises:
            ClientLeft, SessionEnded: instead of a cancelled call's error.
        """
        self._waiting = call
        if self._over is not None:
            call.cancel()
        try:
            return await call
        except asyncio.CancelledError:
            if self._over is not None:
                raise self._over from None
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the environment cancelled its own call") from None
        finally:
            self._waiting = None

    async def send_text(self, text: str) -> None:
        """Send one frame.

        Raises:
            ClientLeft: nobody is there any more.
        """
        try:
            await self._send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError) as exc:  # which one depends on the server's version
            raise ClientLeft from exc

    async def finish(self, text: str | None = None, code: int = NORMAL_CLOSE) -> None:
        """Say a last word, if any, and close; tolerates that the client is gone."""
        if self._incoming is not None and not self._incoming.done():
            self._incoming.cancel()
        try:
            if text is not None:
                await self.send_text(text)
            await self._send({"type": "websocket.close", "code": code})
        except (ClientLeft, OSError, RuntimeError):
            return

    def _read_ahead(self) -> None:
        self._incoming = self._loop.create_task(self._read())
        self._incoming.add_done_callback(self._arrived)

    async def _read(self) -> dict[str, Any]:
        return await self._receive()

    def _arrived(self, incoming: asyncio.Task[dict[str, Any]]) -> None:
        if incoming.cancelled() or incoming is self._waiting:
            return
        if incoming.exception() or incoming.result()["type"] == "websocket.disconnect":
            self.end(ClientLeft())
