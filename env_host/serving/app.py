# SPDX-License-Identifier: Apache-2.0
"""`HostApp`: which request goes where.

/ws              ours, before it comes here: `session_service` is who serves it (`front_door.py`)
/mcp             ours: sessions, counted in the same table; or in a sibling's (`affinity.py`)
/capacity        ours, where there is a board to read it off; /metrics too
everything else  the project's own app; or `HttpRoutes` when there is none
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...system.prometheus import CONTENT_TYPE
from ..environment.definition import Definition
from ..ipc.capacity import capacity_of
from ..ipc.scoreboard import Scoreboard, now_microseconds
from ..sessions.routing import Siblings
from ..sessions.table import SessionTable
from . import metrics
from .asgi_websocket import Receive, Send
from .http_routes import HttpRoutes, Reply, TextReply, answer, mcp_reply, read_body
from .mcp import Mcp
from .mcp_websocket import McpSocket
from .ws_session import Service

SESSION_PATH = "/ws"


class HostApp:
    """The ASGI application of one environment."""

    def __init__(
        self,
        definition: Definition,
        table: SessionTable,
        *,
        manifest: dict[str, Any],
        step_timeout_seconds: float | None,
        scoreboard: Scoreboard | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self._definition = definition
        self._table = table
        self._step_timeout_seconds = step_timeout_seconds
        self._scoreboard = scoreboard
        self._mcp = Mcp(table, siblings)
        self._routes = HttpRoutes(definition, table, self._mcp, manifest)

    @property
    def session_service(self) -> Service | None:
        """Who serves `/ws`; None when the project does."""
        if SESSION_PATH in self._definition.own_paths:
            return None
        loop = asyncio.get_running_loop()
        return Service(self._table, self._mcp, self._step_timeout_seconds, loop)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        kind, path = scope["type"], scope.get("path")
        if path in self._definition.own_paths:
            await self._serve_rest(scope, receive, send)
            return
        match kind, path:
            case "websocket", "/ws":  # a handshake that the front door did not take
                await send({"type": "websocket.close"})
            case "websocket", "/mcp":
                await McpSocket(scope, receive, send, table=self._table, mcp=self._mcp).serve()
            case "http", "/capacity" | "/metrics" if self._scoreboard and scope["method"] == "GET":
                await answer(send, self._gauges(self._scoreboard, path))
            case "http", "/mcp" if scope["method"] == "POST":
                response = await mcp_reply(self._mcp, await read_body(receive))
                await answer(send, Reply(response))
            case _:
                await self._serve_rest(scope, receive, send)

    def _gauges(self, scoreboard: Scoreboard, path: str) -> Reply:
        capacity = capacity_of(scoreboard, now_microseconds())
        if path == "/capacity":
            return Reply(capacity)
        return TextReply(metrics.render(self._definition.name, capacity), CONTENT_TYPE)

    async def _serve_rest(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if self._definition.app is not None:
            await self._definition.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._routes.serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # refused with 403, as an unknown route is
