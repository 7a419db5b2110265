# SPDX-License-Identifier: Apache-2.0
"""What the first bytes of a connection say of where it belongs; and session ids that say it too.

Only as much of HTTP is understood as decides that; what answers the connection reads the same bytes
again, with care.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from urllib.parse import parse_qs

SESSION_PATHS = (b"/ws", b"/mcp")
END_OF_HEAD = b"\r\n\r\n"
MAX_HEAD_BYTES = 64 * 1024  # of what is longer nothing is understood

_GENERATIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """Where a connection wants to go."""

    wants_session: bool = False  # it will begin a session of its own
    session_id: str | None = None  # it is for this one
    is_upgrade: bool = False  # to a WebSocket: what follows is for the same session


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a session is in."""

    index: int  # its slot on the board
    generation: int


def read_head(data: bytes) -> Head:
    """What a request's head says; nothing, when it is none."""
    line, _, rest = data.partition(b"\r\n")
    words = line.split(b" ")
    if len(words) != 3:
        return Head()
    path, _, query = words[1].partition(b"?")
    session_id = _session_id(query) if b"session_id" in query else None
    is_upgrade = words[0] == b"GET" and path in SESSION_PATHS and b"websocket" in rest.lower()
    wants_session = is_upgrade and session_id is None
    return Head(wants_session=wants_session, session_id=session_id, is_upgrade=is_upgrade)


def new_session_id(owner: Owner) -> str:
    """A random id that names its owner in its last digits."""
    digits = uuid.uuid4().hex
    generation = owner.generation % _GENERATIONS
    return str(uuid.UUID(f"{digits[:24]}{owner.index:04x}{generation:04x}"))


def owner_of(session_id: str) -> Owner | None:
    """Who made this id; None when it is none of ours. It may be gone by now."""
    try:
        digits = uuid.UUID(session_id).hex
    except ValueError:
        return None
    return Owner(int(digits[24:28], 16), int(digits[28:], 16))


def _session_id(query: bytes) -> str | None:
    found = parse_qs(query.decode("latin-1")).get("session_id")
    return found[0] if found else None
