# SPDX-License-Identifier: Apache-2.0
"""The server's side of a WebSocket handshake, without a socket: bytes to `Upgrade`, and the answer.

Only a request that is well-formed beyond doubt is taken; all others are left to uvicorn, which
answers what is wrong with them.

Behind a gateway that can try another replica, a full replica refuses a handshake at once:

    gateway ──handshake: attempt 1, 2 replicas may be asked──▶ this one has no room ──503──▶ gateway
       └─────the same: attempt 2──▶ another one, where the client has its session, or waits for one

The answer says in a header that nothing was begun, so that the request may be sent again. The last
replica that may be asked has the client wait as it would have waited without a gateway.
"""

from __future__ import annotations

import binascii
import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, unquote

from ...schema.protocol import ATTEMPT_HEADER, ATTEMPTS_HEADER, RETRY_HEADER
from ...system.net.access import split_target
from ...system.net.connection_limit import FULL, closing_answer

END_OF_HEAD = b"\r\n\r\n"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_KEY_BYTES = 16
_VERSION = b"13"
_TARGET = re.compile(rb"[!-~]+")  # of the request, RFC 9112, section 3.2
_HEADER = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*")  # RFC 9110, section 5
_RETRY = f"{RETRY_HEADER}: 1\r\n"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A client's request for a WebSocket."""

    path: str
    query: str
    key: bytes
    headers: Mapping[bytes, bytes]  # by their names in lower case

    def parameter(self, name: str) -> str | None:
        """Return a parameter of the address."""
        found = parse_qs(self.query).get(name)
        return found[0] if found else None


@functools.lru_cache(maxsize=1)  # it is asked for where a connection is routed, and where answered
def parse_upgrade(head: bytes) -> Upgrade | None:
    """Parse the handshake in `head`, which ends with an empty line; None when unsure."""
    lines = head.removesuffix(END_OF_HEAD).split(b"\r\n")
    request = lines[0].split(b" ")
    if len(request) != 3 or request[0] != b"GET" or request[2] != b"HTTP/1.1":
        return None
    if not _TARGET.fullmatch(request[1]):
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        if not _HEADER.fullmatch(line):
            return None
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in headers:
            return None
        headers[name] = value.strip()
    key = headers.get(b"sec-websocket-key", b"")
    if not (_asks_for_websocket(headers) and b"host" in headers):
        return None
    try:
        if len(binascii.a2b_base64(key, strict_mode=True)) != _KEY_BYTES:
            return None
    except binascii.Error:
        return None
    path, query = split_target(request[1])
    return Upgrade(unquote(path.decode("latin-1")), query.decode("latin-1"), key, headers)


def acceptance(upgrade: Upgrade, lines: bytes = b"") -> bytes:
    """Make the answer, after which the connection is a WebSocket; `lines` are more headers."""
    digest = hashlib.sha1(upgrade.key + _GUID, usedforsecurity=False).digest()
    token = binascii.b2a_base64(digest, newline=False)
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + token + lines + END_OF_HEAD
    )


def _asks_for_websocket(headers: dict[bytes, bytes]) -> bool:
    return (
        headers.get(b"upgrade", b"").lower() == b"websocket"
        and b"upgrade" in headers.get(b"connection", b"").lower().replace(b" ", b"").split(b",")
        and headers.get(b"sec-websocket-version") == _VERSION
        and b"content-length" not in headers
        and b"transfer-encoding" not in headers
    )


def may_ask_another(head: bytes) -> bool:
    """Return whether the gateway that sent a handshake may ask another replica."""
    upgrade = parse_upgrade(head)
    if upgrade is None:
        return False
    attempt, most = (
        upgrade.headers.get(name.lower().encode(), b"0")
        for name in (ATTEMPT_HEADER, ATTEMPTS_HEADER)
    )
    return attempt.isdigit() and most.isdigit() and 0 < int(attempt) < int(most)


def try_another(detail: str = FULL) -> bytes:
    """Return the answer that refuses a request before any of it has been carried out."""
    return closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers=_RETRY)
