# SPDX-License-Identifier: Apache-2.0
"""Requests for a session that is in another shard: `/mcp` over HTTP, where each may come anywhere.

    client ──POST /mcp, session_id──▶ shard a ──one end of a new socket pair──▶ inbox of shard b
                                        ▲  └──the same POST, on the other end──▶ b serves it
                                        └──────────── its answer ◀──────────────┘

With `--isolate` it is the front that is asked, and `b` is the process of a session: the pair's end
goes by way of the host, which forks a process for a new session and gives it to that.

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
import functools
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import SessionError

Json = dict[str, Any]
GetReady = Callable[[], Awaitable[Callable[[int], None]]]  # to give a descriptor away

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
        isolate: GetReady | None = None,
    ) -> None:
        """
        Args:
            owner_of: the other shard that has a session; None: it is ours, or nobody's.
            roomier: a shard for a new session when we have no room; None: we do, or nobody has.
            hand_over: gives shard `index` a connection's descriptor, and closes it here.
            isolate: where new sessions have processes of their own; waits for room for one, and
                returns what gives that process a connection's descriptor, and closes it here.
        """
        self.owner_of = owner_of
        self.roomier = roomier
        self._hand_over = hand_over
        self._isolate = isolate

    @property
    def isolates(self) -> bool:
        """Whether no session is to begin here."""
        return self._isolate is not None

    async def ask_new(self, request: Json) -> Json:
        """What the process of a new session answers.

        Raises:
            CapacityReached: there is no room for one.
            SessionError: it ended before it had answered.
        """
        assert self._isolate is not None
        return await _ask(request, self._isolate, "The process of the new session")

    async def ask(self, index: int, request: Json) -> Json:
        """What shard `index` answers to a JSON-RPC request.

        Raises:
            SessionError: it ended before it had answered.
        """

        async def get_ready() -> Callable[[int], None]:
            return functools.partial(self._hand_over, index)

        return await _ask(request, get_ready, f"Shard {index}, which has this session,")


async def _ask(request: Json, get_ready: GetReady, who: str) -> Json:
    """`get_ready` is called last: what it returns must be, or a slot that it took is lost."""
    ours, theirs = socket.socketpair()
    with theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            give = await get_ready()
            give(theirs.detach())
            body = json.dumps(request).encode()
            writer.writelines([_HEAD % len(body), body])
            return body_of(await reader.read())
        except (OSError, ValueError) as exc:
            raise SessionError(f"{who} ended before it had answered.") from exc
        finally:
            writer.close()


def body_of(response: bytes) -> Json:
    """The JSON of an HTTP response that ended with its connection.

    Raises:
        ValueError: it is cut off, no object, or none of the request's.
    """
    head, _, body = response.partition(_END_OF_HEAD)
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError("no JSON: it was not answered")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
