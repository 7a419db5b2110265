# SPDX-License-Identifier: Apache-2.0
"""A project's own middleware, around what is ours: the handshakes of sessions, and POST to `/mcp`.

    handshake ─▶ home shard ─▶ the project's app: middleware ─▶ route of `/ws` ─▶ `_accept`
                     │ ◀── accepted, and the headers that were added ── or refused ──┘
                     ├─▶ a slot in any shard, the session
                     └─▶ the refusal: 403, or the answer that the middleware gave instead

Upstream's server runs it around the whole of a session. Here it runs around the handshake, as an
ASGI scope of its own: it may refuse, and add headers. The messages of the session it does not see.
The route stands where upstream's stands in the app (`environment/own_middleware.py`), so whatever
the app does on the way to it is done, in the process that has the project's state.

    it raises, or sends nothing   500, as from upstream's server
    it does not answer in time    500
    it answers with what is none  500, from `shard/base.py`
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from ...system.access_tokens import without_parameter
from ..environment.own_middleware import Receive, Send, answered_by
from ..websocket.handshake import Upgrade

CHECK_SECONDS = 30.0  # for the middleware to answer
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}

Message = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

log = logging.getLogger("openenvd.env_host")


async def check_handshake(
    app: Any, upgrade: Upgrade, transport: asyncio.Transport
) -> Headers | bytes:
    """Send a handshake through an app whose route of sessions accepts it.

    Returns:
        The headers that the answer is to have, when it was accepted; otherwise the whole answer.
    """
    sent: list[Message] = []
    received = iter([{"type": "websocket.connect"}])

    async def receive() -> Message:
        return next(received, {"type": "websocket.disconnect", "code": 1005})

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await app(answered_by(_accept, _scope(upgrade, transport)), receive, send)
    except Exception:
        if not _is_accepted(sent):
            log.exception("the middleware of this project failed at a handshake")
    if _is_accepted(sent):
        return _headers_of(sent[0])
    return _refusal(sent)


async def _accept(_: Message, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})


def _is_accepted(sent: list[Message]) -> bool:
    return bool(sent) and sent[0]["type"] == "websocket.accept"


def _headers_of(accepted: Message) -> Headers:
    headers = [(bytes(name), bytes(value)) for name, value in accepted.get("headers") or ()]
    if protocol := accepted.get("subprotocol"):
        headers.append((b"sec-websocket-protocol", protocol.encode()))
    return headers


def _refusal(sent: list[Message]) -> bytes:
    """Return the answer to a handshake that was not accepted, as uvicorn gives it."""
    status, headers, body = HTTPStatus.INTERNAL_SERVER_ERROR.value, [], b"Internal Server Error"
    if sent and sent[0]["type"] == "websocket.close":
        status, body = HTTPStatus.FORBIDDEN.value, b""
    elif sent and sent[0]["type"] == "websocket.http.response.start":
        status, headers = sent[0]["status"], list(sent[0].get("headers") or ())
        body = b"".join(message.get("body", b"") for message in sent[1:])
    own = {b"content-length", b"connection", b"transfer-encoding"}
    lines = [b"%b: %b" % (name, value) for name, value in headers if name.lower() not in own]
    lines += [b"content-length: %d" % len(body), b"connection: close"]
    return b"HTTP/1.1 %d %b\r\n%b\r\n\r\n%b" % (
        status,
        _PHRASES.get(status, b""),
        b"\r\n".join(lines),
        body,
    )


def _scope(upgrade: Upgrade, transport: asyncio.Transport) -> Message:
    """Return what uvicorn would make of the handshake."""
    path, headers = upgrade.path, list(upgrade.headers.items())
    protocols = upgrade.headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(",")
    return {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "ws",
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": without_parameter(upgrade.query.encode("latin-1"))[0],
        "headers": headers,
        "subprotocols": [one for each in protocols if (one := each.strip())],
        "extensions": {"websocket.http.response": {}},
    }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
