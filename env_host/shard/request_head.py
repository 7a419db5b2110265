# SPDX-License-Identifier: Apache-2.0
"""Routes a connection by its first bytes, and by session ids that name their process.

Only as much of HTTP is parsed as decides that; the server that answers the connection parses the
same bytes again, with care.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote_to_bytes

from ...system.access_tokens import split_target

MCP_PATH = b"/mcp"
SESSION_PATHS = (b"/ws", MCP_PATH)
END_OF_HEAD = b"\r\n\r\n"

_GENERATIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """What a connection asks for."""

    wants_session: bool = False  # the connection begins a session of its own
    session_id: str | None = None  # it is for this session
    is_upgrade: bool = False  # to a WebSocket: all that follows is for the same session
    path: str = field(default="", compare=False)  # empty when the head is invalid


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has a session."""

    index: int  # its row of the scoreboard
    generation: int
    replica: int = 0


def read_head(data: bytes) -> Head:
    """Parse a request's head; an invalid one gives an empty `Head`."""
    line, _, rest = data.partition(b"\r\n")
    words = line.split(b" ")
    if len(words) != 3:
        return Head()
    path, query = split_target(words[1])
    if b"%" in path:
        path = unquote_to_bytes(path)  # as `parse_upgrade` does
    is_upgrade = words[0] == b"GET" and path in SESSION_PATHS and b"websocket" in rest.lower()
    session_id = _session_id(query) if b"session_id" in query else None
    if is_upgrade and path == MCP_PATH:
        session_id = None  # it has a session of its own, whatever its address names
    wants_session = is_upgrade and session_id is None
    return Head(wants_session, session_id, is_upgrade, path.decode("latin-1"))


def new_session_id(owner: Owner) -> str:
    """Return a random id that names its owner in its last digits."""
    x = os.urandom(9).hex()
    own = f"{owner.replica:04x}{owner.index:04x}{owner.generation % _GENERATIONS:04x}"
    # As `uuid.uuid4()` has it, in a third of the time.
    return f"{x[:8]}-{x[8:12]}-4{x[12:15]}-a{x[15:18]}-{own}"


def owner_of(session_id: str) -> Owner | None:
    """Return the owner of an id, which may have exited; None for an id from elsewhere."""
    try:
        digits = uuid.UUID(session_id).hex
    except ValueError:
        return None
    return Owner(int(digits[24:28], 16), int(digits[28:], 16), int(digits[20:24], 16))


def _session_id(query: bytes) -> str | None:
    found = parse_qs(query.decode("latin-1")).get("session_id")
    return found[0] if found else None
