# SPDX-License-Identifier: Apache-2.0
"""The token of an environment: how it is written into a base URL, and read from a request.

    http://127.0.0.1:21000?token=TOKEN      what a client is given as its base URL
    Authorization: Bearer TOKEN             what it may send instead

Clients make the address of a route by appending to the base URL, so what arrives is
`/?token=TOKEN/ws`: `split_target` puts the route back in its place. Tokens consist of characters
that mean nothing in a URL.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

TOKEN_BYTES = 32
PARAMETER = "token"
_CHARACTERS = r"[A-Za-z0-9._~-]"
TOKEN_PATTERN = rf"{_CHARACTERS}{{16,256}}"
# The query of a base URL with a route appended; upstream's MCP client encodes its slash.
_APPENDED = re.compile(
    rf"((?:.*&)?{PARAMETER}={_CHARACTERS}+)((?:/|%2[Ff])[^?&]*)(?:[?&](.*))?".encode(), re.DOTALL
)
_SLASH = re.compile(rb"%2[Ff]")


def new_token() -> str:
    """Return a random token."""
    import secrets  # 3 ms, for launches alone

    return secrets.token_urlsafe(TOKEN_BYTES)


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Split a request's target into path and query; a route behind the token is the path."""
    path, _, query = target.partition(b"?")
    if path in (b"/", b"") and (found := _APPENDED.fullmatch(query)):
        parameters = found[1] if found[3] is None else found[1] + b"&" + found[3]
        return _SLASH.sub(b"/", found[2]), parameters
    return path, query


def without_parameter(query: bytes) -> tuple[bytes, bytes | None]:
    """Take the token out of a query: the rest of the query, and the token, or None."""
    if PARAMETER.encode() not in query:
        return query, None
    start = f"{PARAMETER}=".encode()
    parts = query.split(b"&")
    kept = [part for part in parts if not part.startswith(start)]
    sent = [part.removeprefix(start) for part in parts if part.startswith(start)]
    return b"&".join(kept), sent[0] if sent else None


def is_token(sent: bytes | None, token: str) -> bool:
    """Compare in constant time."""
    import hmac  # OpenSSL, where there is a token to compare

    return sent is not None and hmac.compare_digest(sent, token.encode())


def bearer(authorization: bytes) -> bytes | None:
    """Return the token of an `Authorization` header; None when it has none."""
    scheme, _, sent = authorization.partition(b" ")
    return sent.strip() if scheme.lower() == b"bearer" else None


def with_token(address: str, token: str | None) -> str:
    """Return the base URL of an environment that wants this token."""
    return address if token is None else f"{address}?{PARAMETER}={token}"


def without_token(url: str) -> tuple[str, str | None]:
    """Split a base URL into the address, which may be shown, and the token, or None."""
    if f"{PARAMETER}=" not in url:
        return url, None
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    token = next((value for name, value in pairs if name == PARAMETER), None)
    kept = urlencode([(name, value) for name, value in pairs if name != PARAMETER])
    return urlunsplit(parts._replace(query=kept)), token


def bearer_header(token: str | None) -> dict[str, str]:
    """Return the headers with which a client sends its token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}
