# SPDX-License-Identifier: Apache-2.0
"""A project's own routes: all requests for them are answered by one process, the home shard.

What a project serves besides sessions (the web interface and gradio, routes and WebSockets of its
own) keeps its state in its process: upstream's server has one. Here the home shard answers all of
it, and runs the project's start-up and shutdown hooks (lifespan). It is shard 0, the first to be
forked and the last to be given back. Sessions, our routes and upstream's, which make an environment
for each request, are answered by every shard.

    lobby ─▶ shard a reads the head ─┬─ a session, or a shared path ─▶ answered by a
                                     └─ an own path ─descriptor, bytes read─▶ inbox of home
    a kept connection ─▶ `KeptConnection` looks at the next request ─ the same; in the home shard,
                         too, a handshake that the project's middleware sees begins anew

Which paths are shared is read from the app when it is imported (`environment/upstream_project.py`);
what is not known to be shared is the home's. A connection that went there stays there: it can
answer everything.

    home is not forked yet    the connection waits in its inbox, which the supervisor holds
    home exits                those that it had taken are reset, those in its inbox go to its
                              successor, which runs the hooks again; what it kept in memory is lost
    home is full              it answers 503, as any shard does
    home hangs                own routes wait; sessions on other shards go on
    pipelined requests        one for an own path, sent to shard a before a's last answer was read,
                              is answered 421 and the connection closed: the client may ask again

Where each session has a process of its own, the front is the home shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...system.access_tokens import split_target
from ...system.http_limits import MAX_HEAD_BYTES
from ..ipc.fd_messages import duplicate
from ..websocket.handshake import END_OF_HEAD


@dataclass(frozen=True, slots=True)
class Home:
    """Which later requests of a connection are for the home shard, and how it is given them."""

    is_own: Callable[[str], bool]  # whether a path is the project's own, and this another shard
    handshakes: frozenset[str]  # the paths of sessions that the project's middleware is asked about
    take: Callable[[int, bytes], None]  # a connection, and what was read of it


class KeptConnection:
    """One HTTP connection: a mixin before uvicorn's protocol with limits (`HttpLimits`)."""

    home: Home | None = None  # None: every request is answered here

    # uvicorn's, and `HttpLimits`'
    cycle: Any
    transport: Any
    _is_refused: bool
    _unused_bytes: int

    _beginning = b""  # of a request whose path has not arrived

    def data_received(self, data: bytes) -> None:
        """Pass on what is for this process; give the connection away when a request is not."""
        if self.home is None or not self._is_between_requests():
            super().data_received(data)  # type: ignore[misc]
            return
        data = self._beginning + data
        line, end, _ = data.partition(b"\r\n")
        words = line.split(b" ")
        path = split_target(words[1])[0].decode("latin-1") if end and len(words) == 3 else ""
        is_handshake = words[0] == b"GET" and path in self.home.handshakes
        is_enough = END_OF_HEAD in data if is_handshake else bool(end)
        self._beginning = data if not is_enough and len(data) <= MAX_HEAD_BYTES else b""
        if self._beginning:
            return
        if is_enough and path and (is_handshake or self.home.is_own(path)):
            self._give_away(self.home, data)
        else:
            super().data_received(data)  # type: ignore[misc]

    def _is_between_requests(self) -> bool:
        cycle = self.cycle
        return (
            cycle is not None  # the first request was routed when it arrived
            and not self._is_refused
            and cycle.response_complete
            and not cycle.more_body
            and not self._unused_bytes
            and not self.transport.get_write_buffer_size()
        )

    def _give_away(self, home: Home, data: bytes) -> None:
        fd = None if self.transport.is_closing() else duplicate(self.transport)
        self.transport.abort()  # this descriptor only: the connection has another
        if fd is not None:
            home.take(fd, data)
