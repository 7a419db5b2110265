# SPDX-License-Identifier: Apache-2.0
"""Routes requests for a session to the shard that has it: `/mcp` over HTTP may arrive at any shard.

    client ──POST /mcp, session_id──▶ shard a ──one end of a new socket pair──▶ inbox of shard b
                                        ▲  └──the same POST, on the other end──▶ b serves it
                                        └──────────── b's answer ◀─────────────┘

With `--isolate`, `a` is the front-end shard and `b` the process of a session. The pair's end goes
to the supervisor, which passes it to that process, forking one for a new session.

The pair's end for a session of another replica goes to its control socket (`ipc/fd_messages.py`).

An HTTP connection is kept alive, and its next request may be for any session. So only the request
is forwarded, as HTTP; to `b`, the socket pair is a connection like any other. A session's id names
its owner (`shard/connections.py`).

    b exits meanwhile     its end of the pair closes: the client gets a JSON-RPC error that says so
    b had exited before   its replacement has another generation, so it answers `Unknown session_id`
    b is busy             the client waits as long as it would if it were connected to b
    the client leaves     the request continues: it may have had effects already
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...system.text.json_lines import Json
from ..errors import SessionError

Give = Callable[[int], None]  # gives another process a descriptor, and closes it here
GetReady = Callable[[], Awaitable[Give]]  # waits until a descriptor can be handed over

_HEAD = (
    b"POST /mcp HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The other shards and replicas, which may answer requests. Needs a running event loop."""

    owner_of: Callable[[str], Give | None]  # to the other process that has a session
    roomier: Callable[[], Awaitable[Give | None]]  # to a shard with room, when this one has none
    isolate: GetReady | None = None  # waits for room, where new sessions have processes
    token: bytes = b""  # of the environment, if it has one

    async def ask(self, give: Give | None, request: Json) -> Json:
        """Return another process's answer to a request; None: that of a new session's process.

        Raises `CapacityReached`: there is no room for a new session; `SessionError`: the process
        ended before it had answered.
        """
        who = (
            "The process of the new session"
            if give is None
            else "The process that has this session"
        )
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                if give is None:  # last: what it returns must be called, or its slot is lost
                    assert self.isolate is not None
                    give = await self.isolate()
                give(theirs.detach())
                body = json.dumps(request).encode()
                writer.writelines([_HEAD % (self.token, len(body)), body])
                return body_of(await reader.read())
            except (OSError, ValueError) as exc:
                raise SessionError(f"{who} ended before it had answered.") from exc
            finally:
                writer.close()


def body_of(response: bytes) -> Json:
    """Parse the JSON of an HTTP response that ended with its connection.

    Raises `ValueError`: the response is cut off, an error, or not a JSON object.
    """
    head, _, body = response.partition(_END_OF_HEAD)
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError("not a JSON answer: the status is not 200")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
