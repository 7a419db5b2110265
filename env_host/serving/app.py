# SPDX-License-Identifier: Apache-2.0
"""`HostApp`: which request goes where.

/ws              ours, before it comes here: by `session_service` (`uvicorn_server.py`)
/mcp             ours: as a WebSocket in the same way; by POST, sessions of this process's table,
                 or of another's (`sessions/routing.py`)
/capacity        ours, where there is a scoreboard to read it from; /metrics too
DRAIN_ROUTE      ours, where the replica has a secret for it
everything else  the project's own app (`own_app.py`); or `HttpRoutes` when there is none
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from ...schema.protocol import DRAIN_HEADER, DRAIN_ROUTE
from ...system.net.access_tokens import is_token
from ...system.net.http_limits import send_answer
from ...system.text.prometheus import CONTENT_TYPE
from ..environment.definition import Definition
from ..environment.own_middleware import SESSION_PATHS, Receive, Send, answered_by
from ..ipc.capacity import capacity_of, render_metrics
from ..ipc.scoreboard import Scoreboard, now_microseconds
from ..sessions.routing import Siblings
from ..sessions.table import SessionTable
from ..websocket.frames import PartialMessages
from .http_routes import HttpRoutes, Reply
from .mcp import Mcp
from .own_app import Home
from .ws_session import SessionService


class HostApp:
    """The ASGI application of one environment."""

    def __init__(
        self,
        definition: Definition,
        table: SessionTable,
        *,
        manifest: dict[str, Any],
        partial: PartialMessages,
        scoreboard: Scoreboard | None = None,
        siblings: Siblings | None = None,
        drain_secret: str | None = None,
    ) -> None:
        self.home: Home | None = None
        if siblings is not None and siblings.to_home is not None:
            checked = SESSION_PATHS if definition.checks_handshakes else frozenset()
            is_own = (lambda _: False) if siblings.is_home else definition.is_own
            self.home = Home(is_own, checked - definition.own_paths, siblings.to_home)
        self._is_asked = siblings is not None  # not the process of one session, whose shard was
        self._definition = definition
        self._table = table
        self._scoreboard = scoreboard
        self._drain_secret = drain_secret
        self._mcp = Mcp(table, siblings)
        self.session_service = SessionService(
            SESSION_PATHS - definition.own_paths,
            table,
            self._mcp.answer,
            asyncio.get_running_loop(),
            partial,
            self._is_asked and definition.checks_handshakes,
        )
        self._routes = HttpRoutes(definition, table, manifest)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        with contextlib.suppress(ClientLeft):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        kind, path = scope["type"], scope.get("path", "")
        # A pair of sockets has no address: what comes through one, a shard has let pass already.
        is_outside = kind == "http" and scope.get("server") is not None
        if is_outside and self.home is not None and self.home.is_own(path):
            await _answer(send, MISDIRECTED)
            return
        if path in self._definition.own_paths:
            await self._serve_rest(scope, receive, send)
            return
        match kind, path:
            case "websocket", "/ws" | "/mcp":  # a handshake that `ProtocolSwitch` did not take
                await send({"type": "websocket.close"})
            case "http", "/capacity" | "/metrics" if self._scoreboard and scope["method"] == "GET":
                await _answer(send, self._gauges(self._scoreboard, path))
            case "http", path if path == DRAIN_ROUTE and self._drain_secret:
                await _answer(send, _drain(self._drain_secret, scope))
            case "http", "/mcp" if scope["method"] == "POST":
                if is_outside and self._is_asked and self._definition.middleware is not None:
                    scope = answered_by(self._answer_mcp, scope)
                    await self._definition.app(scope, receive, send)
                else:
                    await self._answer_mcp(scope, receive, send)
            case _:
                await self._serve_rest(scope, receive, send)

    async def _answer_mcp(self, _scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        await _answer(send, Reply(await self._mcp.answer_text(body)))

    def _gauges(self, scoreboard: Scoreboard, path: str) -> Reply:
        capacity = capacity_of(scoreboard, now_microseconds())
        if path == "/capacity":
            is_shared = bool(getattr(self._definition.env_class, "SHARED_STATE", False))
            shared = {"shared_state": is_shared}
            return Reply(capacity | shared | {"loop_tasks": len(asyncio.all_tasks())})
        return Reply(render_metrics(self._definition.name, capacity).encode(), kind=CONTENT_TYPE)

    async def _serve_rest(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if self._definition.app is not None:
            await self._definition.app(scope, receive, send)
        elif scope["type"] == "http":
            body = await _read_body(receive)
            await _answer(send, await self._routes.reply(scope["method"], scope["path"], body))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # refused with 403, as an unknown route is


def _drain(secret: str, scope: dict[str, Any]) -> Reply:
    """Have the supervisor, this process's parent, drain the replica."""
    sent = dict(scope["headers"]).get(DRAIN_HEADER.lower().encode())
    if scope["method"] != "POST" or not is_token(sent, secret):
        return Reply({"detail": f"this takes POST with the secret in {DRAIN_HEADER}"}, 403)
    os.kill(os.getppid(), signal.SIGUSR1)
    return Reply({"is_draining": True})


MISDIRECTED = Reply(
    {"detail": "Send this request when the one before it is answered, or on another connection."},
    421,
    connection="close",
)


class ClientLeft(Exception):
    """The client left before it had sent its whole body, or that was refused."""


async def _read_body(receive: Receive) -> bytes:
    """Read the whole body of a request; raises `ClientLeft` when there is nobody to answer."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, reply: Reply) -> None:
    """Send one reply."""
    await send_answer(send, reply.status, reply.headers, reply.body)
