# SPDX-License-Identifier: Apache-2.0
"""Who may call: the token, and the Host and Origin of the call.

A web page that the user visits can make the browser send requests to 127.0.0.1. It
cannot read the token, and the checks below refuse it even before that: a foreign `Origin`, or a
`Host` that is not loopback (DNS rebinding). The Unix socket lies in a 0700 folder, and needs the
token all the same, so that there is one rule.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from ...system.access_tokens import bearer, is_token
from ...system.request_origin import is_allowed_host, is_allowed_origin
from ...system.units import MB
from ..errors import ApiError, Forbidden, TooLarge, Unauthorized

LOOPBACK = "127.0.0.1"  # where it listens
_ONCE = frozenset({b"host", b"origin", b"authorization"})  # headers that come once at most
TOKEN_BYTES = 32
MAX_BODY_BYTES = MB  # of all variables of an environment, and then some


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


def refuse(headers: Sequence[tuple[bytes, bytes]], token: str) -> ApiError | None:
    """Why a call with these headers is refused; None when it may pass."""
    found = dict(headers)
    if [name for name, _ in headers if name in _ONCE] != [name for name in found if name in _ONCE]:
        return Forbidden("Host, Origin or Authorization was sent more than once")
    host = found.get(b"host", b"").decode("latin-1")
    if not is_allowed_host(host, LOOPBACK):
        return Forbidden(f"Host {host!r} is not this machine", "use http://127.0.0.1")
    origin = found.get(b"origin")
    if origin is not None and not is_allowed_origin(origin.decode("latin-1"), host):
        return Forbidden(f"Origin {origin.decode('latin-1')!r} may not call this daemon")
    if not is_token(bearer(found.get(b"authorization", b"")), token):
        return Unauthorized(
            "this call carries no valid token",
            "send `Authorization: Bearer <token>`; the token is in the daemon's home folder",
        )
    return None


class Guard:
    """ASGI middleware: refuses a call before anything else has looked at it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the refusal, or pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        refusal = refuse(headers, self._token) or _too_large(dict(headers))
        if refusal is not None:
            await _answer(refusal, send)
            return
        await self._app(scope, receive, send)


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
