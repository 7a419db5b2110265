# SPDX-License-Identifier: Apache-2.0
"""Who may call: the token, and the Host and Origin of the call.

A web page that the user visits can make the browser send requests to 127.0.0.1. It
cannot read the token, and the checks below refuse it even before that: a foreign `Origin`, or a
`Host` that is not loopback (DNS rebinding). The Unix socket lies in a 0700 folder, and needs the
token all the same, so that there is one rule.

The dashboard has a session instead of the token, and `Origin` must then be the daemon's own,
including the port. Its files are public in the wheel, and so served to every page of this machine
that passes the checks of Host and Origin. How a browser signs in (`BrowserSessions`):

    openenv dashboard ──token──▶ POST /v1/dashboard/link ──▶ http://127.0.0.1:8585/#<code>
    the page ──code, once──▶ POST /dashboard/session ──▶ cookie, and the session's key
    every call of the page: cookie, `X-Openenvd-Key: <key>`, and, when it changes something,
    an `Origin` that is the daemon's own

The code is in the fragment, which browsers never send; the page removes it from the address
before anything else. It is valid once, and for a few minutes.

The cookie is not enough. Cookies are not bound to ports: a browser sends those of 127.0.0.1 to
every server on this machine, including environments, and `SameSite` does not prevent that, since
they are the same site. Only the page's own origin can read the key, so another server that sees
the cookie cannot use it, and no foreign page can send the header.
Cookie and key are both signed with the daemon's token: they survive a restart of the daemon, and
end with their time, or with the token (docs/decisions/0028).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ...schema.protocol import LOOPBACK
from ...system.net.access import bearer, is_allowed_host, is_allowed_origin, is_token
from ...system.text.units import MB
from ..errors import ApiError, Forbidden, TooLarge, Unauthorized

LINK_SECONDS = 300.0  # after which an unused link is invalid
SESSION_SECONDS = 7 * 24 * 3600
KEY_HEADER = b"x-openenvd-key"


class BrowserSessions:
    """One-time codes, and the sessions that begin with them."""

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = hashlib.sha256(b"openenvd browser sessions\0" + token.encode()).digest()
        self._clock = clock
        self._codes: dict[str, float] = {}  # until when each is valid
        # It differs by home, since a browser keeps the cookies of several daemons.
        self.cookie_name = f"openenvd-{self._signed('name')[:8]}"

    def new_code(self) -> str:
        """Return a code for one sign-in."""
        now = self._clock()
        self._codes = {code: ends for code, ends in self._codes.items() if ends > now}
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + LINK_SECONDS
        return code

    def begin(self, code: str) -> tuple[str, str] | None:
        """Return a `Set-Cookie` and the session's key; None: the code is used, old or wrong."""
        ends = self._codes.pop(code, 0.0)
        if ends <= self._clock():
            return None
        text = f"{self._clock() + SESSION_SECONDS:.0f}.{secrets.token_urlsafe(12)}"
        value = f"{text}.{self._signed('cookie', text)}"
        attributes = f"Path=/; Max-Age={SESSION_SECONDS}; HttpOnly; SameSite=Strict"
        return f"{self.cookie_name}={value}; {attributes}", self._signed("key", text)

    def is_valid(self, cookie_header: bytes, key: bytes) -> bool:
        """Return whether a call carries the cookie and the key of a session that has not ended.

        A page on another port of this host can set cookies of the same name, before or behind ours;
        those without a valid signature are ignored.
        """
        pairs = (each.strip().partition("=") for each in cookie_header.decode("latin-1").split(";"))
        found = (value for name, _, value in pairs if name == self.cookie_name)
        return any(self._is_signed(value, key) for value in found)

    def _is_signed(self, value: str, key: bytes) -> bool:
        text, _, signature = value.rpartition(".")
        ends = text.partition(".")[0]
        return (
            hmac.compare_digest(signature.encode(), self._signed("cookie", text).encode())
            and hmac.compare_digest(key, self._signed("key", text).encode())
            and ends.isdigit()
            and int(ends) > self._clock()
        )

    def _signed(self, *parts: str) -> str:
        digest = hmac.digest(self._secret, "\0".join(parts).encode(), "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


# Headers that come once at most.
_ONCE = frozenset({b"host", b"origin", b"authorization", b"cookie", KEY_HEADER})
_READING = frozenset({"GET", "HEAD"})
PAGE = "/"
PAGE_FILES = "/dashboard/"  # of the page, and where it signs in
SIGN_IN = "/dashboard/session"
TOKEN_BYTES = 32
MAX_BODY_BYTES = MB  # enough for all variables of an environment

Headers = Sequence[tuple[bytes, bytes]]


def ensure_token(path: Path) -> str:
    """Return the daemon's token from its 0600 file, or make it and write it there."""
    try:
        if token := path.read_text().strip():
            path.chmod(0o600)
            return token
    except (FileNotFoundError, UnicodeDecodeError):  # none, or a damaged one
        pass
    token = secrets.token_urlsafe(TOKEN_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # a file that was there, and empty
    with open(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def refuse(headers: Headers, token: str) -> ApiError | None:
    """Return why a call with these headers is refused; None when it may pass."""
    sent = bearer(dict(headers).get(b"authorization", b""))
    return refuse_page(headers) or (None if is_token(sent, token) else _unauthorized())


def refuse_page(headers: Headers) -> ApiError | None:
    """Return why a call is refused for its Host or Origin, whatever its credentials are."""
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


def refuse_other_page(found: Mapping[bytes, bytes], method: str) -> ApiError | None:
    """Return why a call is refused because only the daemon's own page may make it."""
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
    """ASGI middleware that refuses a call before anything else reads it."""

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
        error = refusal or _too_large(dict(headers))
        app = self._app if error is None else JSONResponse(error.to_json(), error.status)
        await app(scope, receive, send)

    def _refuse(self, method: str, path: str, headers: Headers) -> ApiError | None:
        found = dict(headers)
        if path == SIGN_IN:
            return refuse_page(headers) or refuse_other_page(found, method)
        if method in _READING and (path == PAGE or path.startswith(PAGE_FILES)):
            return refuse_page(headers)
        if b"cookie" in found and b"authorization" not in found:  # the signed-in dashboard's
            if not self._sessions.is_valid(found[b"cookie"], found.get(KEY_HEADER, b"")):
                return _unauthorized()
            return refuse_page(headers) or refuse_other_page(found, method)
        return refuse(headers, self._token)


def _too_large(headers: dict[bytes, bytes]) -> ApiError | None:
    """Return why a body, which is kept in memory and in the database, is refused for its size."""
    length = headers.get(b"content-length", b"0")
    if b"transfer-encoding" in headers or not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return TooLarge(
            f"a body needs a Content-Length of at most {MAX_BODY_BYTES} bytes",
            "pass larger data in a file",
        )
    return None
