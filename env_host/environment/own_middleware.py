# SPDX-License-Identifier: Apache-2.0
"""A project's own ASGI middleware: found in its app, so that it is run around what is ours, too.

    the app's middleware ─▶ `SessionRoute`, where upstream's route was ─┬─▶ what the scope names
                                                                         └─▶ upstream's

How it is asked at a handshake is in `serving/own_app.py`. A project without middleware pays
nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

SESSION_PATHS = frozenset({"/ws", "/mcp"})
ANSWER = "openenvd.answer"  # the extension of a scope that names what answers it
# Of Starlette's, what lets handshakes pass unread.
_HTTP_ONLY = frozenset(f"starlette.middleware.{name}" for name in ("base", "cors", "gzip"))

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


class SessionRoute:
    """Stands in the app where upstream's route of sessions stood."""

    def __init__(self, upstreams: Answer) -> None:
        self._upstreams = upstreams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on to what the scope names; otherwise to upstream."""
        answer: Answer = scope.get("extensions", {}).get(ANSWER, self._upstreams)
        await answer(scope, receive, send)


def answered_by(answer: Answer, scope: Scope) -> Scope:
    """Return a scope that `SessionRoute` lets `answer` answer."""
    return {**scope, "extensions": {**scope.get("extensions", {}), ANSWER: answer}}


@dataclass(frozen=True, slots=True)
class OwnMiddleware:
    """The middleware of one project."""

    names: tuple[str, ...]
    sees_handshakes: bool
    is_reachable: bool  # it can be run around what is ours

    @property
    def sentence(self) -> str:
        """Return what a user should know of it; empty: nothing."""
        names = ", ".join(self.names)
        if not self.is_reachable:
            return (
                f"the middleware of this project ({names}) cannot be run around sessions: its app "
                "is served as it is, by one process"
            )
        if not self.sees_handshakes:
            return ""
        return (
            f"the middleware of this project ({names}) is asked at the handshake of each session; "
            "it does not see the session's messages"
        )


def own_middleware(app: Any, upstreams: Any) -> OwnMiddleware | None:
    """Find the middleware in front of `upstreams`, the app that upstream made; None: there is none.

    Upstream's routes of sessions are replaced by `SessionRoute`.
    """
    apps = [app] if app is upstreams else [app, upstreams]
    found = [each.cls for one in apps for each in getattr(one, "user_middleware", ())]
    if not hasattr(app, "routes"):  # it wraps what upstream made
        found.append(type(app))
    if not found:
        return None
    routes = [route for route in getattr(upstreams, "routes", ()) if _is_of_sessions(route)]
    for route in routes:
        route.app = SessionRoute(route.app)
    return OwnMiddleware(
        names=tuple(getattr(each, "__name__", str(each)) for each in found),
        sees_handshakes=not all(map(is_http_only, found)),
        is_reachable=bool(routes),
    )


def _is_of_sessions(route: Any) -> bool:
    name = getattr(getattr(route, "endpoint", None), "__qualname__", "")
    return getattr(route, "path", None) in SESSION_PATHS and name.startswith("HTTPEnvServer.")


def is_http_only(middleware: Any) -> bool:
    """Return whether a middleware's class lets handshakes pass unread."""
    call = middleware.__call__ if isinstance(middleware, type) else middleware
    return getattr(call, "__module__", None) in _HTTP_ONLY
