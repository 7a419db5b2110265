# SPDX-License-Identifier: Apache-2.0
"""Decides who may use an environment, by the head of each request, before anything acts on it.

    every HTTP request, every handshake ──▶ `AccessGuard` ──▶ the application
    handshakes of our own sessions ───────▶ `Access.permits` ──▶ the session; or else as above

    503  it is for another server: a gateway names the environment, the generation and the replica
         that it expects at an address, and a restart can give the address to another one. Nothing
         was begun (`RETRY_HEADER`), so the gateway tries another replica
    403  its Host or Origin is not allowed (`system/net/access.py`)
    401  it does not have the token (`system/net/access.py`)
    415  its body is not JSON, on a route that takes JSON: a browser sends text and forms to any
         server without asking it

A handshake is refused with the same status, not by a close after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ...schema.protocol import ENVIRONMENT_HEADER, GENERATION_HEADER, REPLICA_HEADER, RETRY_HEADER
from ...system.net import access
from ...system.net.http_limits import Headers, Message, Receive, Send, send_answer

if TYPE_CHECKING:
    from ...schema.protocol import HostConfig
    from ..websocket.handshake import Upgrade


# Routes that take only JSON: ours, and upstream's in a project's app.
JSON_ROUTES = frozenset({"/reset", "/step", "/mcp", "/web/reset", "/web/step"})
PREFLIGHT_SECONDS = 600
SHOWN_CHARACTERS = 100  # of a header, in a refusal
_WHOSE = tuple(
    name.lower().encode() for name in (ENVIRONMENT_HEADER, GENERATION_HEADER, REPLICA_HEADER)
)
_ONCE = frozenset({b"host", b"origin", b"authorization", b"content-type", b"sec-fetch-site"})
_ALLOW_ORIGIN = b"access-control-allow-origin"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request is refused."""

    status: int
    detail: str
    headers: Headers = field(default_factory=list)


class Access:
    """Decides which requests an environment permits; names of headers are in lower case."""

    def __init__(self, config: HostConfig) -> None:
        self._bound = config.host
        self._origins = frozenset(config.allow_origin)
        self._token = config.token
        own = {name.lower().encode(): v.encode("latin-1") for name, v in config.headers.items()}
        self._own = [(name, own[name]) for name in _WHOSE if name in own]

    def permits(self, upgrade: Upgrade) -> bool:
        """Return whether a handshake may begin a session."""
        headers, query = upgrade.headers, upgrade.query.encode("latin-1")
        refusal = self.other_refusal(headers) or self.origin_refusal(headers)
        return not (refusal or self.token_refusal(headers, query))

    def other_refusal(self, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Return the refusal of a request for another server; None: it is for this server."""
        for name, own in self._own:
            if (wanted := headers.get(name, own)) != own:
                asked = wanted.decode("latin-1")[:SHOWN_CHARACTERS]
                text = f"the gateway asks for {asked}, and {own.decode('latin-1')} has its address"
                return Refusal(503, f"{text} now", [(RETRY_HEADER.encode(), b"1")])
        return None

    def origin_refusal(self, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Return why a request is refused by its Host and Origin; None when both are allowed."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not access.is_allowed_host(host, self._bound, self._origins):
            return Refusal(403, _not_allowed("Host", host, "http://NAME:PORT"))
        origin = headers.get(b"origin")
        if origin is None:
            # Another site's page loads this without an Origin, as an image; it may link to it.
            is_link = headers.get(b"sec-fetch-mode") == b"navigate"
            is_page = is_link and headers.get(b"sec-fetch-dest") == b"document"
            if headers.get(b"sec-fetch-site") != b"cross-site" or is_page:
                return None
            site = "Sec-Fetch-Site 'cross-site'"
            return Refusal(403, f"{site} is not allowed: a page loads this as its own")
        if not access.is_allowed_origin(text := origin.decode("latin-1"), host, self._origins):
            return Refusal(403, _not_allowed("Origin", text, "ORIGIN"))
        return None

    def token_refusal(self, headers: Mapping[bytes, bytes], query: bytes) -> Refusal | None:
        """Return why a request is refused by its token; None when none is wanted, or it is sent."""
        if self._token is None:
            return None
        sent = access.bearer(headers.get(b"authorization", b"")), access.without_parameter(query)[1]
        if any(access.is_token(one, self._token) for one in sent):
            return None
        return Refusal(
            401,
            "this environment wants its token: send `Authorization: Bearer TOKEN`, or connect to "
            "the base URL that `openenv address NAME` prints",
            [(b"www-authenticate", b"Bearer")],
        )


@dataclass(eq=False, slots=True)
class AccessGuard:
    """ASGI middleware: refuses a request before the application has seen any of it."""

    _app: Any
    _access: Access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Refuse the request, answer its preflight, or pass it on without its token."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers, twice = _by_name(scope["headers"])
        if scope["path"] == "/" and (query := scope["query_string"]):
            # A route that was appended to a base URL with a token goes where it belongs.
            path, scope["query_string"] = access.split_target(b"/?" + query)
            scope["path"], scope["raw_path"] = unquote(path.decode("latin-1")), path
        refusal = twice or self._access.other_refusal(headers)
        refusal = refusal or self._access.origin_refusal(headers)
        if refusal is None and (origin := headers.get(b"origin")) is not None:
            if preflight := _preflight(scope, headers, origin):
                await _answer(scope, receive, send, 204, preflight, b"")
                return
            send = _readable_by(origin, send)
        refusal = refusal or self._access.token_refusal(headers, scope["query_string"])
        refusal = refusal or _body_refusal(scope, headers)
        if refusal is not None:
            body = json.dumps({"detail": refusal.detail}).encode()
            lines = [(b"content-type", b"application/json"), *refusal.headers]
            await _answer(scope, receive, send, refusal.status, lines, body)
            return
        scope["query_string"] = access.without_parameter(scope["query_string"])[0]
        await self._app(scope, receive, send)


def _not_allowed(header: str, value: str, form: str) -> str:
    shown = value[:SHOWN_CHARACTERS]
    return f"{header} {shown!r} is not allowed; to allow it, launch with --allow-origin {form}"


def _by_name(headers: Headers) -> tuple[dict[bytes, bytes], Refusal | None]:
    """Return the headers by name, and a refusal when one that is looked at came twice."""
    found: dict[bytes, bytes] = {}
    refusal = None
    for name, value in headers:
        key = name.lower()
        if key in found and key in _ONCE:
            refusal = Refusal(403, f"more than one {key.decode().title()} header is not allowed")
        found[key] = value
    return found, refusal


def _preflight(scope: Message, asked: Mapping[bytes, bytes], origin: bytes) -> Headers | None:
    """Return the headers that answer a browser's preflight; None if the request is none."""
    method = asked.get(b"access-control-request-method")
    if scope["type"] != "http" or scope["method"] != "OPTIONS" or method is None:
        return None
    answer = [
        (_ALLOW_ORIGIN, origin),
        (b"vary", b"origin"),
        (b"access-control-allow-methods", method),
        (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
    ]
    if (wanted := asked.get(b"access-control-request-headers")) is not None:
        answer.append((b"access-control-allow-headers", wanted))
    return answer


def _body_refusal(scope: Message, headers: Mapping[bytes, bytes]) -> Refusal | None:
    """Refuse what is not JSON on a route that takes JSON; an empty body needs no type."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in JSON_ROUTES:
        return None
    kind = headers.get(b"content-type")
    if kind is None:
        is_empty = headers.get(b"content-length", b"0") == b"0"
        if is_empty and b"transfer-encoding" not in headers:
            return None
    elif kind.partition(b";")[0].strip().lower() == b"application/json":
        return None
    return Refusal(415, f"{scope['path']} takes `Content-Type: application/json` alone")


def _readable_by(origin: bytes, send: Send) -> Send:
    """Allow a page to read the answers, unless the application itself decides that."""

    async def send_readable(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if all(name.lower() != _ALLOW_ORIGIN for name, _ in headers):
                headers += [(_ALLOW_ORIGIN, origin), (b"vary", b"origin")]
            message = {**message, "headers": headers}
        await send(message)

    return send_readable


async def _answer(
    scope: Message, receive: Receive, send: Send, status: int, headers: Headers, body: bytes
) -> None:
    """Answer a request, or a handshake with something other than a WebSocket."""
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # `websocket.connect`
        kind = "websocket.http.response"
    await send_answer(send, status, headers, body, kind)
