# SPDX-License-Identifier: Apache-2.0
"""OpenEnv's HTTP routes for a class that is served without upstream's package.

Each `/reset`, `/step` and `/state` has an environment of its own for that one request, as
upstream's have; episodes need `/ws`. An upstream project keeps its own routes. POST to `/mcp` is
answered before it comes here.

Not Starlette's router, which would save 45 lines: importing it costs 2 MB of PSS for an idle
environment, and 41 ms for each start in another project's Python.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..environment.definition import Definition
from ..environment.instances import keep_accepted
from ..errors import CallTimedOut
from ..sessions.session import Session
from ..sessions.table import SessionTable
from .messages import decode, encode_error, plain_errors, to_json

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


class HttpRoutes:
    """The routes of one environment."""

    def __init__(
        self, definition: Definition, table: SessionTable, manifest: dict[str, Any]
    ) -> None:
        self._definition = definition
        self._table = table
        self._manifest = manifest

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
        describe = getattr(self._definition.env_class, "get_metadata", None)
        if describe is None:
            return Reply(self._manifest_metadata())

        async def read(session: Session) -> Reply:
            return Reply(await session.thread.run(session.env.get_metadata))

        return await self._table.one_shot("get_metadata", read)

    def _manifest_metadata(self) -> dict[str, Any]:
        """Describe a class that does not describe itself."""
        name = self._manifest.get("name", self._definition.name)
        text = self._manifest.get("description", f"{name} environment")
        rest = dict.fromkeys(("readme_content", "author", "documentation_url"))
        version = str(self._manifest.get("version", "1.0.0"))
        return {"name": name, "description": text, "version": version, **rest}

    async def _read_state(self, session: Session) -> Reply:
        return Reply(await session.thread.run(session.ready_calls.read_state))

    async def _reset(self, body: bytes) -> Reply:
        request = ResetRequest.model_validate(decode(body.decode()) if body.strip() else {})

        async def reset(session: Session) -> Reply:
            calls = session.ready_calls
            given = keep_accepted(calls.reset, request.model_dump(exclude_unset=True))
            reset = functools.partial(calls.reset, **given)
            seen = await session.call(reset, calls.signature.reset_is_async)
            return Reply(Outcome(**self._definition.observation_form.serialize(seen)))

        return await self._table.one_shot("The reset", reset)

    async def _step(self, body: bytes) -> Reply:
        request = StepRequest.model_validate(decode(body.decode()))
        try:
            action = self._definition.parse_action(request.action)
        except ValidationError as exc:
            return Reply({"detail": plain_errors(exc)}, 422)

        async def step(session: Session) -> Reply:
            calls = session.ready_calls
            given = request.model_dump(exclude_unset=True, exclude={"action"})
            given = keep_accepted(calls.step, given)
            step = functools.partial(calls.step, action, **given)
            seen = await session.call(step, calls.signature.step_is_async)
            return Reply(Outcome(**self._definition.observation_form.serialize(seen)))

        return await self._table.one_shot("The step", step)


def _in_body(errors: list[Any]) -> list[Any]:
    """Locate errors as FastAPI does, in the body, and without the link that pydantic adds."""
    kept = [{k: v for k, v in error.items() if k != "url"} for error in errors]
    return [{**error, "loc": ["body", *error["loc"]]} for error in kept]


def _not_json(error: str, position: int) -> dict[str, Any]:
    where, kind = ["body", position], {"type": "json_invalid", "msg": "JSON decode error"}
    return {**kind, "loc": where, "input": {}, "ctx": {"error": error}}
