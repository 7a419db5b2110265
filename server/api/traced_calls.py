# SPDX-License-Identifier: Apache-2.0
"""A span for each call that changes something, where traces are on: all those by POST.

It continues the trace that the call's `traceparent` names. `RequestTraces` makes the request that
comes of it part of the same trace.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...tracing.context import HEADER, TraceContext
from ...tracing.tracer import Span, Tracer
from ..dispatch.request_traces import CALL, Call

_DEFECT = 500


class TracedCalls:
    """ASGI middleware, behind the guard."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the call within a span."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        status = _DEFECT

        async def note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        span = self._begin(scope)
        token = CALL.set(Call(span))
        try:
            await self._app(scope, receive, note_status)
        finally:
            CALL.reset(token)
            if span is not None:
                _end(span, scope, status)

    def _begin(self, scope: Scope) -> Span | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        return self._tracer.begin(
            "POST",
            parent=TraceContext.parse(headers.get(HEADER.encode())),
            kind="SERVER",
            attributes={
                "http.request.method": "POST",
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
                "network.protocol.version": scope["http_version"],
                "user_agent.original": headers.get(b"user-agent"),
            },
        )


def _end(span: Span, scope: Scope, status: int) -> None:
    route = _route(scope)
    span.rename(f"POST {route}")
    span.set({"http.route": route, "http.response.status_code": status})
    if status >= _DEFECT:
        span.fail(str(status))
    span.end()


def _route(scope: Scope) -> str:
    """The path, with the names of its parameters instead of their values.

    A route itself knows its path below its router's prefix alone, in some versions of FastAPI.
    """
    names = {value: f"{{{name}}}" for name, value in scope.get("path_params", {}).items()}
    return "/".join(names.get(part, part) for part in scope["path"].split("/"))
