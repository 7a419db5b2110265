# SPDX-License-Identifier: Apache-2.0
"""Decides who may use a server of this machine, by token, `Host` and `Origin`.

The token of an environment, in a base URL or a header:

    http://127.0.0.1:21000?token=TOKEN      the base URL that a client gets
    Authorization: Bearer TOKEN             the header that it may send instead

Clients make the address of a route by appending to the base URL, so what arrives is
`/?token=TOKEN/ws`: `split_target` puts the route back in its place. Tokens consist of characters
without a meaning in URLs.

A browser runs pages of strangers, and these can send requests to the browser's machine. Two
headers, which a page cannot set, identify them:

    Origin  the page that sent the request. Programs send none; browsers send it with every
            WebSocket handshake and every POST, and `null` for pages without an origin of their own
    Host    the name to which the client connected. A page whose own name was made to resolve to
            127.0.0.1 (DNS rebinding) has the right origin, but its own name as the host

The daemon (`server/api/security.py`) and environments (`env_host/serving/access.py`) use this
module. Anything but a plain name or address is refused: user information, zone ids, trailing dots,
short forms of addresses.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
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
    import secrets  # takes 3 ms, which only launches need

    return secrets.token_urlsafe(TOKEN_BYTES)


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Split a request's target into path and query; a route after the token is the path."""
    path, _, query = target.partition(b"?")
    if path in (b"/", b"") and (found := _APPENDED.fullmatch(query)):
        parameters = found[1] if found[3] is None else found[1] + b"&" + found[3]
        return _SLASH.sub(b"/", found[2]), parameters
    return path, query


def without_parameter(query: bytes) -> tuple[bytes, bytes | None]:
    """Split a query into the query without its token, and the token or None."""
    if PARAMETER.encode() not in query:
        return query, None
    start = f"{PARAMETER}=".encode()
    parts = query.split(b"&")
    kept = [part for part in parts if not part.startswith(start)]
    sent = [part.removeprefix(start) for part in parts if part.startswith(start)]
    return b"&".join(kept), sent[0] if sent else None


def is_token(sent: bytes | None, token: str) -> bool:
    """Return whether the token is the expected one, in constant time."""
    import hmac  # loads OpenSSL, and so only for a token

    return sent is not None and hmac.compare_digest(sent, token.encode())


def bearer(authorization: bytes) -> bytes | None:
    """Return the token of an `Authorization` header; None if it has none."""
    scheme, _, sent = authorization.partition(b" ")
    return sent.strip() if scheme.lower() == b"bearer" else None


def with_token(address: str, token: str | None) -> str:
    """Return the base URL of an environment that requires this token."""
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


MAX_NAME_CHARACTERS = 300  # of a whole header; a name of DNS has 253 at most
_CACHED = 32  # headers, each of which may be as long as a head
_MAX_PORT = 65535
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_-])?)(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared, not bound


def host_name(header: str) -> str | None:
    """Return the name in a `Host` header: lower case, without port and brackets; None if invalid.

    Addresses are returned as `ipaddress` spells them.
    """
    found = _HOST.fullmatch(header.lower()) if len(header) <= MAX_NAME_CHARACTERS else None
    if found is None or int(found[2] or 0) > _MAX_PORT:
        return None
    name = found[1]
    if name.startswith("["):
        return _address(name[1:-1])
    # Some resolvers treat a name that ends in a number as an address: `127.1`, `0x7f.1`.
    if re.search(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)$", name):
        return _address(name)
    return None if ".." in name else name


def origin_host(origin: str) -> str | None:
    """Return the name of the host in an `Origin` header; None if there is none, as in `null`."""
    found = _ORIGIN.fullmatch(origin.lower()) if len(origin) <= MAX_NAME_CHARACTERS else None
    return None if found is None else host_name(found[2])


def is_loopback(name: str) -> bool:
    """Return whether a name or an address, without a port, is this machine's own."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@lru_cache(_CACHED)
def is_allowed_host(header: str, bound: str, origins: frozenset[str] = frozenset()) -> bool:
    """Return whether a server that is `bound` to an address may be called by this `Host` header.

    Further origins may be allowed, and with them the names of their hosts.
    """
    name = host_name(header)
    if name is None:
        return False
    if is_loopback(name) or name == host_name(f"[{bound}]" if ":" in bound else bound):
        return True
    # The client used an address, so no name can have been rebound.
    if _address(bound) in _ANY_ADDRESS and _address(name) is not None:
        return True
    return any(name == origin_host(origin) for origin in origins)


@lru_cache(_CACHED)
def is_allowed_origin(header: str, host: str, origins: frozenset[str] = frozenset()) -> bool:
    """Return whether a page with this `Origin` header may use a server.

    Its own pages have its `Host` header as their origin. Further ones may be allowed, as
    `read_origin` spells them.
    """
    scheme, _, authority = header.lower().partition("://")
    name = origin_host(header) if scheme in ("http", "https") else None
    if name is not None and (is_loopback(name) or authority == host.lower()):
        return True
    return header.lower() in origins


def read_origin(text: str) -> str:
    """Return an origin as browsers spell it: `http://host:81`. Raises `ValueError`: it is none."""
    origin = text.lower().rstrip("/")
    if origin_host(origin) is None:
        raise ValueError(f"{text!r} is not an origin: write https://host or http://host:3000")
    scheme, _, rest = origin.partition("://")
    usual = {"http": ":80", "https": ":443"}.get(scheme, "")
    return f"{scheme}://{rest.removesuffix(usual)}" if usual else origin


def _address(name: str) -> str | None:
    """Return an address as `ipaddress` spells it; None if it is not one, or has a zone id."""
    try:
        return None if "%" in name else str(ipaddress.ip_address(name))
    except ValueError:
        return None
