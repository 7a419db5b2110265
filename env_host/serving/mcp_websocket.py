# SPDX-License-Identifier: Apache-2.0
"""One client on the `/mcp` WebSocket: bare JSON-RPC, with an environment of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ...system.websocket import NORMAL_CLOSE
from ..environment.mcp_types import RpcCode, rpc_error
from ..errors import SessionEnded, SessionError
from ..sessions.table import Session, SessionTable
from . import messages
from .asgi_websocket import ClientLeft, Receive, Send, SocketDoor
from .mcp import Mcp


class McpSocket(SocketDoor):
    """One session that speaks JSON-RPC only."""

    def __init__(
        self, scope: dict[str, Any], receive: Receive, send: Send, *, table: SessionTable, mcp: Mcp
    ) -> None:
        super().__init__(scope, receive, send)
        self._table = table
        self._mcp = mcp
        self._session: Session | None = None
        self._abandoned = False

    async def serve(self) -> None:
        """Serve the client until either side ends the session."""
        await self.accept()
        last_word = None
        try:
            await self._open()
            while True:
                answer = await self._answer(await self.next_text())
                await self.send_text(answer.decode())
        except ClientLeft:
            pass
        except SessionError as exc:
            response = rpc_error(RpcCode.SERVER_ERROR, str(exc), data=exc.details() or None)
            last_word = messages.encode(response)
        except Exception as exc:
            last_word = messages.encode(rpc_error(RpcCode.SERVER_ERROR, str(exc)))
        finally:
            if self._session is not None:
                closing = self._table.close(self._session, abandoned=self._abandoned)
                await asyncio.shield(closing)
            await self.finish(last_word.decode() if last_word else None, NORMAL_CLOSE)

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
        response = await self._call(asyncio.ensure_future(self._mcp.answer(data, self._session)))
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
