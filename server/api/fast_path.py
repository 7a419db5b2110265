# SPDX-License-Identifier: Apache-2.0
"""Answers the two calls of every request without FastAPI's machinery.

    POST /v1/requests                      ──┐  understood and done: answered here
    GET  /v1/requests/<id>?wait_seconds=…  ──┤
                                             └  anything else: on to FastAPI, as if nothing had been

More than half of what such a call costs the event loop is routing, dependencies and validation of
what we have made ourselves. The routes stay (`routes_requests.py`), with the same handlers beneath:
they are what is documented, and they say what is wrong with a call. So whatever is not plainly
right here (a body that does not fit, a refusal, an error) goes to them from its beginning; nothing
has been written by then, as nothing of a submission that was refused or failed ever is.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...requests_db.errors import DatabaseError
from ..errors import ApiError
from .dependencies import Dependencies
from .routes_requests import MAX_WAIT_SECONDS, SubmitBody, submit, waited_for

_PATH = "/v1/requests"
_ONE = re.compile(rf"{_PATH}/([0-9a-f]{{16}})")
_WAIT = re.compile(rb"wait_seconds=(\d{1,2}(?:\.\d{1,6})?)")
_JSON = (b"content-type", b"application/json")


class FastPath:
    """ASGI middleware, behind the guard."""

    def __init__(self, app: ASGIApp, deps: Dependencies) -> None:
        self._app = app
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the call, or pass it on to FastAPI."""
        if scope["type"] == "http":
            if scope["method"] == "POST" and scope["path"] == _PATH:
                return await self._submit(scope, receive, send)
            if scope["method"] == "GET" and (one := _ONE.fullmatch(scope["path"])):
                return await self._wait(one[1], scope, receive, send)
        return await self._app(scope, receive, send)

    async def _submit(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        try:
            body = _body_of(scope, messages)
            answer = await submit(body, self._deps)
        except (ValidationError, ApiError, DatabaseError):
            await self._app(scope, _again(messages, receive), send)
            return
        await _answer(202, answer, send)

    async def _wait(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = _seconds(scope["query_string"])
        if seconds is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await waited_for(self._deps, request_id, seconds)
        except (ApiError, DatabaseError):
            await self._app(scope, receive, send)
            return
        await _answer(200, answer, send)


@cache
def _submission() -> TypeAdapter[Any]:
    return TypeAdapter(SubmitBody)


def _body_of(scope: Scope, messages: list[Message]) -> Any:
    """The model of a body.

    Raises:
        ValidationError: also of what is not said to be JSON, or was not sent whole.
    """
    is_json = _JSON in scope["headers"] and all(m["type"] == "http.request" for m in messages)
    content = b"".join(message.get("body", b"") for message in messages) if is_json else b""
    return _submission().validate_json(content)


def _seconds(query: bytes) -> float | None:
    """How long to wait; None when the query says anything else."""
    said = _WAIT.fullmatch(query)
    seconds = float(said[1]) if said else 0.0
    return seconds if 0 < seconds <= MAX_WAIT_SECONDS else None


def _again(messages: list[Message], receive: Receive) -> Receive:
    """What was received already, and then whatever comes."""
    kept = iter(messages)

    async def receive_again() -> Message:
        return next(kept, None) or await receive()

    return receive_again


async def _answer(status: int, answer: Any, send: Send) -> None:
    body = orjson.dumps(answer)
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
