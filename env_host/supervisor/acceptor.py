# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections of a replica's address, as long as this replica is to serve them.

Peer replicas may listen at the same address. While this one has no room for sessions, what arrives
is left in the kernel's queues for them, for a moment; then a part of it is accepted all the same:
the peers may have no room either, and an HTTP request needs none.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from typing import TYPE_CHECKING

from ..ipc.scoreboard import Field
from .context import SupervisorContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ipc.fd_messages import PeerReplicas

YIELD_SECONDS = 0.25  # for peer replicas to accept what this one has no room for
ROOM_POLL_INTERVAL_SECONDS = 0.03  # while it has none
PEERS_POLL_INTERVAL_SECONDS = 1.0
ACCEPTED_WHEN_FULL = 8  # connections after each such interval


class Acceptor:
    """Owns the listening sockets, the start barrier, and the decision to accept now."""

    def __init__(
        self,
        context: SupervisorContext,
        listeners: Sequence[socket.socket],
        peers: PeerReplicas | None,
        barrier_fd: int | None,
    ) -> None:
        """Prepare.

        Args:
            context: The supervisor's parts.
            listeners: What holds the address, with the sockets that guard it.
            peers: The replicas that may accept from the same sockets; None: there are none.
            barrier_fd: A pipe; nothing is accepted before its other end is closed.
        """
        self._context = context
        self._listeners = listeners
        self._peers = peers
        self._barrier_fd = barrier_fd
        self._is_watching = False
        self._yields_until = 0.0  # to peer replicas; all of these on the monotonic clock
        self._yields_since = 0.0
        self._has_peers = False  # when last looked
        self._peers_known_until = 0.0
        if barrier_fd is not None:
            context.selector.register(barrier_fd, selectors.EVENT_READ, self._open_barrier)

    @property
    def fds(self) -> list[int]:
        """Descriptors that no child may keep."""
        barrier = [] if self._barrier_fd is None else [self._barrier_fd]
        return [*self._context.lobby.fds, *(one.fileno() for one in self._listeners), *barrier]

    @property
    def has_begun(self) -> bool:
        """Whether the start barrier is open."""
        return self._barrier_fd is None

    def due(self, now: float) -> float | None:
        """Return when to accept again, while the peers are given time to; None: not waiting."""
        return self._yields_until if self._yields_until > now else None

    def watch(self) -> None:
        """Wait for connections while they can be accepted."""
        is_wanted = self._may_accept
        if is_wanted == self._is_watching:
            return
        self._is_watching = is_wanted
        for listener in self._context.lobby.listeners:
            if is_wanted:
                self._context.selector.register(listener, selectors.EVENT_READ, self.accept)
            else:
                self._context.selector.unregister(listener)

    def accept(self) -> None:
        """Accept what has arrived, unless the peer replicas are to take it."""
        if not self._may_accept:
            return
        self._context.idleness.note_use(now := time.monotonic())
        if not self.has_peers(now):
            self._context.lobby.accept()
        elif (room := self._room(now)) > 0:
            self._context.lobby.accept(room)
        else:
            self._yield_to_peers(now)

    def has_peers(self, now: float) -> bool:
        """Whether other replicas accept from the same sockets, or did a moment ago."""
        if self._peers is not None and now >= self._peers_known_until:
            self._peers_known_until = now + PEERS_POLL_INTERVAL_SECONDS
            self._has_peers = self._peers.are_several()
        return self._has_peers

    def close_listeners(self) -> None:
        """Leave what has not been accepted to the other replicas."""
        listeners, self._listeners = self._listeners, ()
        self.watch()
        self._context.lobby.listeners = ()
        for one in listeners:
            one.close()

    @property
    def _may_accept(self) -> bool:
        is_here = bool(self._listeners) and self._barrier_fd is None
        if not is_here or time.monotonic() < self._yields_until:
            return False
        return self._context.lobby.is_open and not self._context.is_stopping

    def _open_barrier(self) -> None:
        """Begin to accept, now that the other end of the barrier is closed."""
        if self._barrier_fd is not None:
            self._context.selector.unregister(self._barrier_fd)
            os.close(self._barrier_fd)
            self._barrier_fd = None
            self._context.idleness.note_use(time.monotonic())

    def _yield_to_peers(self, now: float) -> None:
        if now >= self._yields_until + ROOM_POLL_INTERVAL_SECONDS:  # a new interval begins
            self._yields_since = now
        self._yields_until = now + ROOM_POLL_INTERVAL_SECONDS
        if now - self._yields_since >= YIELD_SECONDS:
            self._yields_since = now
            self._context.lobby.accept(ACCEPTED_WHEN_FULL)

    def _room(self, now: float) -> int:
        """Return how many more sessions there may be than connections are here; never too many."""
        self._context.lobby.look(now)  # first, as connections go
        rows = self._context.scoreboard.shard_counters()
        waiting = self._context.lobby.load + sum(row[Field.WAITING] for row in rows)
        return sum(max(0, row[Field.MAX_SESSIONS] - row.load) for row in rows) - waiting
