# SPDX-License-Identifier: Apache-2.0
"""Requests for a session that is in another shard: `/mcp` over HTTP, where each may come anywhere.

    client ──POST /mcp, session_id──▶ shard a ──one end of a new socket pair──▶ inbox of shard b
                                        ▲  └──the same POST, on the other end──▶ b serves it
                                        └──────────── its answer ◀──────────────┘

A WebSocket is handed over as a whole (`handover.py`). An HTTP connection cannot be: it is kept
alive, and its next request may be for any session. So the request alone travels, as HTTP: to `b` it
is a connection like any other. Who owns a session its id says (`heads.py`).

    b dies meanwhile      its end of the pair closes: the client gets a JSON-RPC error that says so
    b had died before     its successor is another generation: `Unknown session_id`, as it is
    b is busy             the client waits as it would have waited there
    the client leaves     the request is not taken back: it may have had effects
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from .errors import SessionError

Json = dict[str, Any]

_HEAD = (
    b"POST /mcp HTTP/1.1\r\nhost: shard\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n"
)
_END_OF_HEAD = b"\r\n\r\n"


class Siblings:
    """The other shards of the replica, to be asked. Within a running loop."""

    def __init__(
        self,
        *,
        owner_of: Callable[[str], int | None],
        roomier: Callable[[], int | None],
        hand_over: Callable[[int, int], None],
    ) -> None:
        """
        Args:
            owner_of: the other shard that has a session; None: it is ours, or nobody's.
            roomier: a shard for a new session when we have no room; None: we do, or nobody has.
            hand_over: gives shard `index` a connection's descriptor, and closes it here.
        """
        self.owner_of = owner_of
        self.roomier = roomier
        self._hand_over = hand_over

    async def ask(self, index: int, request: Json) -> Json:
        """What shard `index` answers to a JSON-RPC request.

        Raises:
            SessionError: it ended before it had answered.
        """
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            self._hand_over(index, theirs.detach())
            body = json.dumps(request).encode()
            writer.writelines([_HEAD % len(body), body])
            return body_of(await reader.read())
        except (OSError, ValueError) as exc:
            text = f"Shard {index}, which has this session, ended before it had answered."
            raise SessionError(text) from exc
        finally:
            writer.close()


def body_of(response: bytes) -> Json:
    """The JSON of an HTTP response that ended with its connection.

    Raises:
        ValueError: it is cut off, or no object.
    """
    _, _, body = response.partition(_END_OF_HEAD)
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
