# SPDX-License-Identifier: Apache-2.0
"""`McpSocket`: one client on the `/mcp` WebSocket, which speaks bare JSON-RPC in its own session.

It is served through ASGI; the hot path, `/ws`, needs none (`ws_session.py`).

One frame is always being read ahead. Its arrival is how a client that leaves in the middle of a
call is noticed at once; its answer waits until the call is done, so that calls never overlap.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ...system.websocket import NORMAL_CLOSE
from ..environment.mcp_types import RpcCode, rpc_error
from ..errors import SessionEnded, SessionError
from . import messages

if TYPE_CHECKING:
    from ..sessions.session import Session
    from ..sessions.table import SessionTable

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class ClientLeft(Exception):
    """The client has closed the connection."""


class AsgiWebSocket:
    """One WebSocket through ASGI: accepts, reads ahead, waits, ends. Knows no messages."""

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
        """The path of the address that the client asked for."""
        return str(self._scope["path"])

    @property
    def transport(self) -> Any:
        """The connection's transport: uvicorn's `send` is a method of the protocol that has it."""
        return getattr(getattr(self._send, "__self__", None), "transport", None)

    def check_liveness(self) -> None:
        """Do nothing: uvicorn pings these clients itself."""

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
        """Return the next text frame.

        Raises:
            ClientLeft: the client has closed the connection.
            SessionEnded: the session was ended meanwhile.
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
        """Return the result of `call`, which is cancelled when the client leaves or on `end`.

        Raises:
            ClientLeft: instead of a cancelled call's error: the client left.
            SessionEnded: the same, when the session was ended.
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
            ClientLeft: the connection is closed.
        """
        try:
            await self._send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError) as exc:  # which one depends on the server's version
            raise ClientLeft from exc

    async def finish(self, text: str | None = None, code: int = NORMAL_CLOSE) -> None:
        """Send a last frame, if any, and close; tolerates that the client is gone."""
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


class McpSocket(AsgiWebSocket):
    """One session that speaks JSON-RPC only."""

    def __init__(
        self,
        scope: dict[str, Any],
        receive: Receive,
        send: Send,
        *,
        table: SessionTable,
        answer_mcp: Callable[[Any, Session | None], Coroutine[Any, Any, dict[str, Any]]],
    ) -> None:
        super().__init__(scope, receive, send)
        self._table = table
        self._answer_mcp = answer_mcp
        self._session: Session | None = None
        self._abandoned = False

    async def serve(self) -> None:
        """Serve the client until either side ends the session."""
        await self.accept()
        last_frame = None
        try:
            await self._open()
            while True:
                answer = await self._answer(await self.next_text())
                await self.send_text(answer.decode())
        except ClientLeft:
            pass
        except SessionError as exc:
            response = rpc_error(RpcCode.SERVER_ERROR, str(exc), data=exc.details() or None)
            last_frame = messages.encode(response)
        except Exception as exc:
            last_frame = messages.encode(rpc_error(RpcCode.SERVER_ERROR, str(exc)))
        finally:
            if self._session is not None:
                closing = self._table.close(self._session, abandoned=self._abandoned)
                await asyncio.shield(closing)
            await self.finish(last_frame.decode() if last_frame else None, NORMAL_CLOSE)

    async def _open(self) -> None:
        session = self._session = await self._table.reserve(self)
        if (creation := session.create()) is not None:
            await self._call(creation)
        await session.enter()

    async def _answer(self, text: str) -> bytes:
        try:
            data = messages.decode(text)
        except json.JSONDecodeError as exc:
            return messages.encode(rpc_error(RpcCode.PARSE_ERROR, f"Parse error: {exc}"))
        response = await self._call(asyncio.ensure_future(self._answer_mcp(data, self._session)))
        try:
            return messages.encode(response)
        except ValueError as exc:
            return messages.encode(rpc_error(RpcCode.INTERNAL_ERROR, str(exc), response["id"]))

    async def _call(self, call: asyncio.Future[Any]) -> Any:
        try:
            return await self.wait(call)
        except (ClientLeft, SessionEnded):
            self._abandoned = not isinstance(call, asyncio.Task)  # a thread cannot be interrupted
            raise
