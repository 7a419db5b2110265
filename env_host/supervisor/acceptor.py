# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections to a replica's address while this replica should serve them.

    kernel's queues ──`Acceptor`, until empty──▶ `Backlog` ──the oldest first──▶ `Distributor`
                                                    └── too many wait: 503

Peer replicas may listen at the same address. While this replica has no room for sessions, it leaves
new connections in the kernel's queues to its peers for a moment. Then it accepts some all the same:
the peers may have no room either, and an HTTP request needs none.

What happens when

    too many are waiting    the next ones are answered 503, with `Retry-After`; copies of sessions'
                            sockets (`close_notices.py`) are closed before there are too many
    no descriptor is left   connections stay in the kernel's queues, and are accepted later
    the supervisor stops    those that wait are answered 503
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..ipc.fd_messages import Unanswered
from ..ipc.scoreboard import Field, now_microseconds
from ..startup import SPARE_FDS
from ..websocket.handshake import try_another
from .close_notices import close_unread, write_last

if TYPE_CHECKING:
    from ..ipc.fd_messages import PeerReplicas
    from .context import SupervisorContext

YIELD_SECONDS = 0.25  # for peer replicas to accept what this one has no room for
ROOM_POLL_INTERVAL_SECONDS = 0.03  # while this replica has no room
PEERS_POLL_INTERVAL_SECONDS = 1.0
ACCEPTED_WHEN_FULL = 8  # connections after each `YIELD_SECONDS`
MAX_AT_ONCE = 4096
CROWD = 64  # connections accepted at once, after which more are likely to follow
FULL_SECONDS = 0.1  # to wait when there are no descriptors left
LINGER_SECONDS = 1.0  # for a refused client to read its answer
MAX_LINGERING = 256

_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

log = logging.getLogger("openenvd.env_host")


class Backlog:
    """The connections that were accepted and passed to no shard. On the supervisor's thread."""

    def __init__(self, listeners: Sequence[socket.socket], *, max_fds: int) -> None:
        """Prepare; nothing is accepted yet. A process may have `max_fds` descriptors."""
        for listener in listeners:
            listener.setblocking(False)
        self.listeners = listeners
        self.is_crowd_arriving = False  # at the last `accept`: there is no time for forks
        self.waiting: deque[Unanswered] = deque()
        self.at_once = min(MAX_AT_ONCE, max_fds // 4)  # before the supervisor does anything else
        self._max_waiting = max(1, max_fds - 2 * SPARE_FDS)
        self._refused: deque[tuple[float, int]] = deque()  # until when, descriptor
        self._has_warned = False
        self._closed_until = 0.0  # to new connections, when there are no descriptors

    @property
    def is_open(self) -> bool:
        """Return whether connections can be accepted now."""
        return time.monotonic() >= self._closed_until

    def accept(self, limit: int | None = None) -> None:
        """Accept the connections in the kernel's queues: all, or at most `limit`."""
        since = now_microseconds()
        of_each = self.at_once // len(self.listeners)
        accepted = 0
        for listener in self.listeners:
            left = of_each if limit is None else min(of_each, limit - accepted)
            for fd in self._accept_from(listener, left):
                accepted += 1
                self.add(Unanswered(since, fd))
        self.is_crowd_arriving = accepted >= CROWD

    def add(self, connection: Unanswered) -> None:
        """Keep a connection, or refuse it if too many wait; a peer replica may pass one on."""
        if len(self.waiting) < self._max_waiting:
            self.waiting.append(connection)
        else:
            self._refuse(connection.fd, "Too many connections are waiting to be served.")

    def put_back(self, connections: Iterable[Unanswered]) -> None:
        """Keep connections that were passed to a shard; the oldest come first again."""
        self.waiting.extend(connections)
        self.waiting = deque(sorted(self.waiting, key=lambda each: each.since))

    def close_refused(self, now: float, limit: int = MAX_LINGERING) -> None:
        """Close those that have had time to read their answer, and the oldest beyond `limit`."""
        while self._refused and (self._refused[0][0] <= now or len(self._refused) > limit):
            close_unread(self._refused.popleft()[1])

    def refuse_all(self, text: str) -> None:
        """Refuse the connections that wait."""
        while self.waiting:
            self._refuse(self.waiting.popleft().fd, text)

    def due(self) -> float | None:
        """Return when to accept again or to close what was refused, on the monotonic clock."""
        moments = [self._closed_until] if not self.is_open else []
        moments += [until for until, _ in itertools.islice(self._refused, 1)]
        return min(moments, default=None)

    def _accept_from(self, listener: socket.socket, limit: int) -> Iterator[int]:
        for _ in range(limit if self.is_open else 0):
            try:
                # As `accept` does, but without reading the listener's family each time.
                fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as exc:
                if exc.errno not in _NO_ROOM:  # an error of this one connection, which is gone
                    continue
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("no more connections can be accepted for now: %s", exc)
                self._closed_until = time.monotonic() + FULL_SECONDS
                return
            self._has_warned = False
            yield fd

    def _refuse(self, fd: int, text: str) -> None:
        """Answer 503, and close later: closing before the request is read resets the client."""
        now = time.monotonic()
        self.close_refused(now, limit=MAX_LINGERING - 1)
        write_last(fd, try_another(text))
        self._refused.append((now + LINGER_SECONDS, fd))


class Acceptor:
    """Owns the listening sockets, the start barrier, and the decision to accept now."""

    def __init__(
        self,
        context: SupervisorContext,
        listeners: Sequence[socket.socket],
        peers: PeerReplicas | None,
        barrier_fd: int | None,
    ) -> None:
        self._context = context
        self._listeners = listeners  # also those that only keep the address from others
        self._peers = peers  # may accept from the same sockets; None: there are none
        self._barrier_fd = barrier_fd  # a pipe; nothing is accepted before its other end is closed
        self._is_watching = False
        self._yields_until = 0.0  # to peer replicas; all of these on the monotonic clock
        self._yields_since = 0.0
        self._has_peers = False  # when last looked
        self._peers_known_until = 0.0
        if barrier_fd is not None:
            context.selector.register(barrier_fd, selectors.EVENT_READ, self._open_barrier)

    @property
    def has_begun(self) -> bool:
        """Return whether the start barrier is open."""
        return self._barrier_fd is None

    def due(self, now: float) -> float | None:
        """Return when to accept again after yielding to the peers; None when not yielding."""
        return self._yields_until if self._yields_until > now else None

    def watch(self) -> None:
        """Wait for connections while they can be accepted."""
        is_wanted = self._may_accept
        if is_wanted == self._is_watching:
            return
        self._is_watching = is_wanted
        for listener in self._context.backlog.listeners:
            if is_wanted:
                self._context.selector.register(listener, selectors.EVENT_READ, self.accept)
            else:
                self._context.selector.unregister(listener)

    def accept(self) -> None:
        """Accept the connections that have arrived, unless they are left to the peer replicas."""
        if not self._may_accept:
            return
        self._context.idleness.note_use(now := time.monotonic())
        if not self.has_peers(now):
            self._context.backlog.accept()
        elif (room := self._room(now)) > 0:
            self._context.backlog.accept(room)
        else:
            if now >= self._yields_until + ROOM_POLL_INTERVAL_SECONDS:  # a new interval begins
                self._yields_since = now
            self._yields_until = now + ROOM_POLL_INTERVAL_SECONDS
            if now - self._yields_since >= YIELD_SECONDS:
                self._yields_since = now
                self._context.backlog.accept(ACCEPTED_WHEN_FULL)

    def has_peers(self, now: float) -> bool:
        """Return whether another replica accepts from the same sockets, or did a moment ago."""
        if self._peers is not None and now >= self._peers_known_until:
            self._peers_known_until = now + PEERS_POLL_INTERVAL_SECONDS
            self._has_peers = self._peers.are_several()
        return self._has_peers

    def close_listeners(self) -> None:
        """Stop listening; the other replicas accept the connections that still wait."""
        listeners, self._listeners = self._listeners, ()
        self.watch()
        self._context.backlog.listeners = ()
        for one in listeners:
            one.close()

    @property
    def _may_accept(self) -> bool:
        is_here = bool(self._listeners) and self._barrier_fd is None
        if not is_here or time.monotonic() < self._yields_until:
            return False
        return self._context.backlog.is_open and not self._context.is_stopping

    def _open_barrier(self) -> None:
        """Begin to accept, now that the other end of the barrier is closed."""
        if self._barrier_fd is not None:
            self._context.selector.unregister(self._barrier_fd)
            os.close(self._barrier_fd)
            self._barrier_fd = None
            self._context.idleness.note_use(time.monotonic())

    def _room(self, now: float) -> int:
        """Return the free sessions less the waiting connections; never an overestimate."""
        self._context.distributor.update(now)  # first: what is taken meanwhile is counted twice
        rows = self._context.scoreboard
        waiting = self._context.distributor.load + sum(row[Field.WAITING] for row in rows)
        return sum(max(0, row[Field.MAX_SESSIONS] - row.load) for row in rows) - waiting
