# SPDX-License-Identifier: Apache-2.0
"""`HostApp`: which request goes where; `HttpRoutes`: OpenEnv's routes of a class without upstream.

/ws              ours: `session_service` takes it before this app does (`uvicorn_server.py`)
/mcp             ours: as a WebSocket in the same way; by POST, sessions of this process's table,
                 or of another's (`Peers`)
/capacity        ours, where there is a scoreboard to read it from; /metrics too
DRAIN_ROUTE      ours, where the replica has a secret for it
everything else  the project's own app (`own_app.py`); or `HttpRoutes` without one

`HttpRoutes` creates an environment for each request for `/reset`, `/step` or `/state`, as upstream
does; episodes need `/ws`. An upstream project keeps its own routes. POST to `/mcp` is answered
before it comes here.

Starlette's router would save 45 lines, but importing it costs 2 MB of PSS for an idle environment,
and 41 ms for each start in another project's Python.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...schema.protocol import DRAIN_HEADER, DRAIN_ROUTE, HostConfig
from ...system.net.access import is_token
from ...system.net.http_limits import Receive, Send, send_answer
from ...system.text.prometheus import CONTENT_TYPE
from ..environment.definition import Definition
from ..environment.instances import keep_accepted, plain_state
from ..environment.interfaces import Environment
from ..environment.upstream_project import SESSION_PATHS, answered_by
from ..errors import CallTimedOut
from ..ipc.reports import capacity_of, render_metrics
from ..ipc.scoreboard import Scoreboard, now_microseconds
from ..sessions.session import Session
from ..sessions.table import SessionTable
from ..startup import ChildConfig
from ..websocket.frames import PartialMessages
from .mcp import Mcp, Peers
from .messages import decode, encode_error, plain_errors, to_json
from .own_app import Routing
from .ws_session import SessionService

# By path. The answer of "/mcp" to POST comes from `HostApp`.
_METHODS = dict.fromkeys(("/health", "/schema", "/metadata", "/state", "/list_environments"), "GET")
_METHODS |= dict.fromkeys(("/reset", "/step", "/mcp"), "POST")

log = logging.getLogger("openenvd.env_host")


class ResetRequest(BaseModel):
    """The body of `/reset`; further fields are the environment's own."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class StepRequest(BaseModel):
    """The body of `/step`; further fields are the environment's own."""

    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)


class Outcome(BaseModel):
    """The answer of `/reset` and `/step`."""

    model_config = ConfigDict(extra="forbid")

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


class Reply:
    """A status and a body: a JSON value, which may hold any text in an error, or bytes."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self, value: Any, status: int = 200, kind: str = "application/json", **headers: str
    ) -> None:
        is_encoded = isinstance(value, bytes)
        self.body = value if is_encoded else to_json(value) if status < 400 else encode_error(value)
        self.status = status
        self.headers = [(b"content-type", kind.encode())]
        self.headers += [(k.encode(), v.encode()) for k, v in headers.items()]


@dataclass(eq=False, slots=True)
class HttpRoutes:
    """The routes of one environment."""

    _definition: Definition
    _table: SessionTable
    _manifest: dict[str, Any]

    async def reply(self, method: str, path: str, body: bytes) -> Reply:
        """Answer one HTTP request."""
        allowed = _METHODS.get(path)
        if allowed is None:
            return Reply({"detail": "Not Found"}, 404)
        if method != allowed or path == "/mcp":
            return Reply({"detail": "Method Not Allowed"}, 405, allow=allowed)
        try:
            return await self._answer(path, body)
        except ValidationError as exc:
            return Reply({"detail": _in_body(plain_errors(exc))}, 422)
        except json.JSONDecodeError as exc:
            return Reply({"detail": [_not_json(exc.msg, exc.pos)]}, 422)
        except UnicodeDecodeError as exc:
            return Reply({"detail": [_not_json("not UTF-8", exc.start)]}, 422)
        except CallTimedOut as exc:
            return Reply({"detail": str(exc)}, 504)
        except Exception as exc:
            extra = {"environment": self._definition.name}
            log.warning("%s failed", path, exc_info=True, extra=extra)
            return Reply({"detail": f"{type(exc).__name__}: {exc}"}, 500)

    async def _answer(self, path: str, body: bytes) -> Reply:
        match path:
            case "/schema":
                return Reply(self._definition.schemas())
            case "/list_environments":
                return Reply([self._definition.name])
            case "/metadata":
                return await self._metadata()
            case "/state":
                return await self._table.one_shot("The state", self._read_state)
            case "/reset":
                return await self._reset(body)
            case "/step":
                return await self._step(body)
        return Reply({"status": "healthy"})  # "/health"

    async def _metadata(self) -> Reply:
        own = getattr(self._definition.env_class, "get_metadata", None)
        if own is None or (own is Environment.get_metadata and self._manifest):
            name = self._manifest.get("name", self._definition.name)
            text = self._manifest.get("description", f"{name} environment")
            rest = dict.fromkeys(("readme_content", "author", "documentation_url"))
            version = str(self._manifest.get("version", "1.0.0"))
            return Reply({"name": name, "description": text, "version": version, **rest})

        async def read(session: Session) -> Reply:
            return Reply(await session.thread.run(session.env.get_metadata))

        return await self._table.one_shot("get_metadata", read)

    async def _read_state(self, session: Session) -> Reply:
        return Reply(await session.thread.run(lambda: plain_state(session.env.state)))

    async def _reset(self, body: bytes) -> Reply:
        request = ResetRequest.model_validate(decode(body.decode()) if body.strip() else {})
        return await self._act("reset", request.model_dump(exclude_unset=True))

    async def _step(self, body: bytes) -> Reply:
        request = StepRequest.model_validate(decode(body.decode()))
        try:
            action = self._definition.parse_action(request.action)
        except ValidationError as exc:
            return Reply({"detail": plain_errors(exc)}, 422)

        given = request.model_dump(exclude_unset=True, exclude={"action"})
        return await self._act("step", given, action)

    async def _act(self, name: str, given: dict[str, Any], *action: Any) -> Reply:
        async def act(session: Session) -> Reply:
            calls = session.ready_calls
            method, is_async = calls.reset, calls.signature.reset_is_async
            if name == "step":
                method, is_async = calls.step, calls.signature.step_is_async
            call = functools.partial(method, *action, **keep_accepted(method, given))
            seen = await session.call(call, is_async)
            return Reply(Outcome(**self._definition.observation_form.serialize(seen)))

        return await self._table.one_shot(f"The {name}", act)


def _in_body(errors: list[Any]) -> list[Any]:
    """Locate errors as FastAPI does, in the body, and without the link that pydantic adds."""
    kept = [{k: v for k, v in error.items() if k != "url"} for error in errors]
    return [{**error, "loc": ["body", *error["loc"]]} for error in kept]


def _not_json(error: str, position: int) -> dict[str, Any]:
    where, kind = ["body", position], {"type": "json_invalid", "msg": "JSON decode error"}
    return {**kind, "loc": where, "input": {}, "ctx": {"error": error}}


class HostApp:
    """The ASGI application of one environment."""

    def __init__(
        self,
        definition: Definition,
        table: SessionTable,
        config: HostConfig,
        scoreboard: Scoreboard,
        others: Peers,
        own: ChildConfig,
        route: Callable[[int, bytes], None],
    ) -> None:
        """`route` routes a connection, of which some bytes were read, as one that has arrived."""
        is_own = (lambda _: False) if own.is_home else definition.is_own
        self.routing = Routing(is_own, SESSION_PATHS - definition.own_paths, route)
        self._definition = definition
        self._table = table
        self._scoreboard = scoreboard
        self._drain_secret = config.drain_secret
        self._mcp = Mcp(table, others)
        lines = "".join(f"\r\n{name}: {value}" for name, value in config.headers.items())
        self.session_service = SessionService(
            SESSION_PATHS - definition.own_paths,
            table,
            self._mcp.answer,
            asyncio.get_running_loop(),
            PartialMessages(config.max_message_bytes),
            definition.checks_handshakes,
            lines.encode("latin-1"),
        )
        self._routes = HttpRoutes(definition, table, config.manifest)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        kind, path = scope["type"], scope.get("path", "")
        # A socket pair has no address; a shard has already checked what comes through it.
        is_outside = kind == "http" and scope.get("server") is not None
        if is_outside and self.routing.is_own(path):
            await _answer(send, MISDIRECTED)
            return
        if path in self._definition.own_paths:
            await self._serve_rest(scope, receive, send)
            return
        match kind, path:
            case "websocket", "/ws" | "/mcp":  # a handshake that `serve_connection` did not take
                await send({"type": "websocket.close"})
            case "http", "/capacity" | "/metrics" if scope["method"] == "GET":
                await _answer(send, self._gauges(path))
            case "http", path if path == DRAIN_ROUTE and self._drain_secret:
                await _answer(send, _drain(self._drain_secret, scope))
            case "http", "/mcp" if scope["method"] == "POST":
                if is_outside and self._definition.middleware is not None:
                    scope = answered_by(self._answer_mcp, scope)
                    await self._definition.app(scope, receive, send)
                else:
                    await self._answer_mcp(scope, receive, send)
            case _:
                await self._serve_rest(scope, receive, send)

    async def _answer_mcp(self, _scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if (body := await _read_body(receive)) is not None:
            await _answer(send, Reply(await self._mcp.answer_text(body)))

    def _gauges(self, path: str) -> Reply:
        capacity = capacity_of(self._scoreboard, now_microseconds())
        if path == "/capacity":
            is_shared = bool(getattr(self._definition.env_class, "SHARED_STATE", False))
            shared = {"shared_state": is_shared}
            return Reply(capacity | shared | {"loop_tasks": len(asyncio.all_tasks())})
        return Reply(render_metrics(self._definition.name, capacity).encode(), kind=CONTENT_TYPE)

    async def _serve_rest(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if self._definition.app is not None:
            await self._definition.app(scope, receive, send)
        elif scope["type"] == "http":
            if (body := await _read_body(receive)) is not None:
                await _answer(send, await self._routes.reply(scope["method"], scope["path"], body))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # refused with 403, as an unknown route is


def _drain(secret: str, scope: dict[str, Any]) -> Reply:
    """Make the supervisor, this process's parent, drain the replica."""
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


async def _read_body(receive: Receive) -> bytes | None:
    """Read the whole body of a request; None: its client has left, or the body was refused."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, reply: Reply) -> None:
    await send_answer(send, reply.status, reply.headers, reply.body)
