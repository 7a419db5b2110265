# SPDX-License-Identifier: Apache-2.0
"""Who may call: the token, and the Host and Origin of the call.

A web page that the user visits can make the browser send requests to 127.0.0.1. It
cannot read the token, and the checks below refuse it even before that: a foreign `Origin`, or a
`Host` that is not loopback (DNS rebinding). The Unix socket lies in a 0700 folder, and needs the
token all the same, so that there is one rule.

The dashboard has no token: it has a session (`browser_sessions.py`), and `Origin` must then be the
daemon's own, port and all. Its files, which anybody has who has the wheel, are given to all pages
of this machine that may ask at all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from ...system.net.access_tokens import bearer, is_token
from ...system.net.request_origin import is_allowed_host, is_allowed_origin
from ...system.text.units import MB
from ..errors import ApiError, Forbidden, TooLarge, Unauthorized
from .browser_sessions import KEY_HEADER, BrowserSessions

LOOPBACK = "127.0.0.1"  # where it listens
# Headers that come once at most.
_ONCE = frozenset({b"host", b"origin", b"authorization", b"cookie", KEY_HEADER})
_READING = frozenset({"GET", "HEAD"})
PAGE = "/"
PAGE_FILES = "/dashboard/"  # of the page, and where it signs in
SIGN_IN = "/dashboard/session"
TOKEN_BYTES = 32
MAX_BODY_BYTES = MB  # of all variables of an environment, and then some

Headers = Sequence[tuple[bytes, bytes]]


def ensure_token(path: Path) -> str:
    """The daemon's token: read from its 0600 file, or made and written there."""
    try:
        if token := path.read_text().strip():
            path.chmod(0o600)
            return token
    except FileNotFoundError:
        pass
    token = secrets.token_urlsafe(TOKEN_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def refuse(headers: Headers, token: str) -> ApiError | None:
    """Why a call with these headers is refused; None when it may pass."""
    sent = bearer(dict(headers).get(b"authorization", b""))
    return refuse_page(headers) or (None if is_token(sent, token) else _unauthorized())


def refuse_page(headers: Headers) -> ApiError | None:
    """Why a call is refused whatever it carries: by its Host, or by the page that it comes from."""
    found = dict(headers)
    if [name for name, _ in headers if name in _ONCE] != [name for name in found if name in _ONCE]:
        return Forbidden("Host, Origin, Authorization or Cookie was sent more than once")
    host = found.get(b"host", b"").decode("latin-1")
    if not is_allowed_host(host, LOOPBACK):
        return Forbidden(f"Host {host!r} is not this machine", "use http://127.0.0.1")
    origin = found.get(b"origin")
    if origin is not None and not is_allowed_origin(origin.decode("latin-1"), host):
        return Forbidden(f"Origin {origin.decode('latin-1')!r} may not call this daemon")
    return None


def refuse_browser(headers: Headers, sessions: BrowserSessions, method: str) -> ApiError | None:
    """Why a call without a token is refused: it is not the signed-in dashboard's own."""
    found = dict(headers)
    key = found.get(KEY_HEADER, b"")
    if not sessions.is_valid(found.get(b"cookie", b""), key):
        return _unauthorized()
    return refuse_page(headers) or refuse_other_page(found, method)


def refuse_other_page(found: Mapping[bytes, bytes], method: str) -> ApiError | None:
    """Why a call is refused that the daemon's own page alone may make."""
    own = b"http://" + found.get(b"host", b"").lower()
    origin = found.get(b"origin", own if method in _READING else b"")
    if origin.lower() != own or found.get(b"sec-fetch-site", b"same-origin") != b"same-origin":
        return Forbidden("this is for the dashboard's own page", "openenv dashboard opens it")
    return None


def _unauthorized() -> Unauthorized:
    return Unauthorized(
        "this call carries no valid token",
        "send `Authorization: Bearer <token>`; the token is in the daemon's home folder",
    )


class Guard:
    """ASGI middleware: refuses a call before anything else has looked at it."""

    def __init__(self, app: ASGIApp, token: str, sessions: BrowserSessions) -> None:
        self._app = app
        self._token = token
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the refusal, or pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        refusal = self._refuse(scope["method"], scope["path"], headers)
        refusal = refusal or _too_large(dict(headers))
        if refusal is not None:
            await _answer(refusal, send)
            return
        await self._app(scope, receive, send)

    def _refuse(self, method: str, path: str, headers: Headers) -> ApiError | None:
        if path == SIGN_IN:
            return refuse_page(headers) or refuse_other_page(dict(headers), method)
        if method in _READING and (path == PAGE or path.startswith(PAGE_FILES)):
            return refuse_page(headers)
        found = dict(headers)
        if b"cookie" in found and b"authorization" not in found:
            return refuse_browser(headers, self._sessions, method)
        return refuse(headers, self._token)


def _too_large(headers: dict[bytes, bytes]) -> ApiError | None:
    """A body is kept in memory and in the database: it must have a bounded Content-Length."""
    length = headers.get(b"content-length", b"0")
    if b"transfer-encoding" in headers or not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return TooLarge(
            f"a body needs a Content-Length of at most {MAX_BODY_BYTES} bytes",
            "pass larger data in a file",
        )
    return None


async def _answer(error: ApiError, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(error.to_json())})
