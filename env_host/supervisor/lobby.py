# SPDX-License-Identifier: Apache-2.0
"""`Lobby`: accepts every connection of the replica at once, and passes them on to the shards.

    kernel's queues ──accept until empty──▶ waiting ──the oldest first──▶ inbox of a shard
                                                   │ ▲                          │
                              too many: 503  ◀─┘ └── taken back ◀── not read in time

Accepting is apart from serving: the kernel's queues are short, a connection that finds its queue
full is dropped and tried again after 1, 3 and 7 s, and a shard that opens and answers connections
cannot empty them in time when thousands come at once. Accepting alone costs microseconds each.

A connection goes to the shard with the fewest sessions that has room; when none has room, to the
one with the fewest, which answers HTTP and lets a session wait for its turn (`shard/admission.py`).
At most `WINDOW_MESSAGES` are in the inbox of a shard, small ones of which it takes one in an
iteration of its loop: so it takes connections at the rate at which it serves, and when it hangs
most of them can be taken back. It counts what it has taken on the scoreboard. Why so:
`docs/decisions/0023-accept-apart-from-serving.md`.

What happens when

    a shard hangs           what it has not taken in `PATIENCE_SECONDS` is taken back as soon as
                            another shard has nothing to take, and it gets none for a while
    a shard exits           what it has not taken goes to the others, or waits for its successor
    all shards are busy     connections wait here; a client that leaves is noticed by its shard
    too many are waiting    the next ones are answered 503, with `Retry-After`; copies of sessions'
                            sockets (`close_notices.py`) are closed before there are too many
    no descriptor is left   connections stay in the kernel's queues, and are accepted later
    the supervisor stops    those that wait are answered 503
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...system.process.descriptors import MAX_FDS, close_all, receive_message, send_message
from ..ipc.fd_messages import carried_bytes, connection_message
from ..ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard, now_microseconds
from ..startup import SPARE_FDS
from .close_notices import close_unread, send_refusal

# A shard takes one message in an iteration of its loop: what it may keep from others if it hangs.
# In a crowd messages are larger: handshakes must not wait for the steps of those who came first.
MIN_IN_MESSAGE = 16
SHARE_IN_MESSAGE = 1 / 4  # of the connections that wait
WINDOW_MESSAGES = 4  # that a shard has been passed and has not taken yet
MAX_AT_ONCE = 4096  # accepted before the supervisor looks at anything else
CROWD = 64  # connections in the kernel's queues, where others are likely to follow
PLACE_SECONDS = 0.001  # between two looks at the shards while connections wait
MAX_PLACE_SECONDS = 0.05  # while none of them takes any
PATIENCE_SECONDS = 0.25  # for a shard to take a connection, before another may get it
CLOSED_SECONDS = 0.5  # that a shard gets no connection, after some were taken back from it
STARTING_SECONDS = 0.5  # that connections wait for a shard that is wanted and does not serve yet
FULL_SECONDS = 0.1  # to wait when there are no descriptors left
LINGER_SECONDS = 1.0  # for a refused client to read its answer
MAX_LINGERING = 256

_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

log = logging.getLogger("openenvd.env_host")


class Waiting(NamedTuple):
    """A connection that no shard has taken."""

    since: int  # on the scoreboard's clock; the order in which connections are placed
    fd: int
    head: bytes = b""  # what a shard has read of it, before it was taken back


class Inbox:
    """Where a shard is passed connections: a pair of sockets, of which the supervisor has both."""

    def __init__(self, index: int, ends: tuple[socket.socket, socket.socket]) -> None:
        self.index = index
        self.reading, self.writing = ends
        self.sent = 0  # to the current process of the shard
        self.taken = 0  # of these, when last looked
        self.progressed_at = 0.0  # when `taken` last grew, or the first was sent
        self.closed_until = 0.0

    @property
    def outstanding(self) -> int:
        """How many connections the shard had not taken when last looked."""
        return self.sent - self.taken


class Lobby:
    """The connections of a replica that no shard has taken. On the supervisor's thread."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        scoreboard: Scoreboard,
        pairs: Sequence[tuple[socket.socket, socket.socket]],
        *,
        max_fds: int,
    ) -> None:
        """Prepare; nothing is accepted yet. A process may have `max_fds` descriptors."""
        for listener in listeners:
            listener.setblocking(False)
        self.listeners = listeners
        self._scoreboard = scoreboard
        self._inboxes = [Inbox(index, ends) for index, ends in enumerate(pairs)]
        self._at_once = most_at_once(max_fds)
        self._most = max(1, max_fds - 2 * SPARE_FDS)
        self._fds_of_shard = max(1, max_fds - SPARE_FDS)
        self._waiting: deque[Waiting] = deque()
        self._refused: deque[tuple[float, int]] = deque()  # until when, descriptor
        self.is_crowd_arriving = False  # when last accepted: no time for anything else
        self._has_warned = False
        self._closed_until = 0.0  # to new connections, when there are no descriptors

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _in_message(self) -> int:
        return max(MIN_IN_MESSAGE, min(MAX_FDS, int(len(self._waiting) * SHARE_IN_MESSAGE)))

    @property
    def fds(self) -> list[int]:
        """The descriptors of the connections, which children must not keep."""
        return [each.fd for each in self._waiting] + [fd for _, fd in self._refused]

    @property
    def load(self) -> int:
        """The connections that wait here, or in the inbox of a shard."""
        return len(self._waiting) + sum(inbox.outstanding for inbox in self._inboxes)

    def has_passed_on(self, row: Counters) -> bool:
        """Whether a shard has, or will have, connections."""
        return bool(row.load or row[Field.OPEN] or self._inboxes[row.index].outstanding)

    @property
    def is_open(self) -> bool:
        """Whether connections can be accepted now."""
        return time.monotonic() >= self._closed_until

    def accept(self, most: int | None = None) -> None:
        """Accept the connections in the kernel's queues: all, or at most so many."""
        since = now_microseconds()
        of_each = self._at_once // len(self.listeners)
        accepted = 0
        for listener in self.listeners:
            left = of_each if most is None else min(of_each, most - accepted)
            for fd in self._accept_from(listener, left):
                accepted += 1
                self.take(Waiting(since, fd))
        self.is_crowd_arriving = accepted >= CROWD

    def take(self, connection: Waiting) -> None:
        """Let a connection wait, or refuse it; another replica may have accepted it."""
        if len(self._waiting) < self._most:
            self._waiting.append(connection)
        else:
            self._refuse(connection.fd, "Too many connections are waiting to be served.")

    def _accept_from(self, listener: socket.socket, most: int) -> Iterator[int]:
        for _ in range(most if self.is_open else 0):
            try:
                # What `accept` does, without its asking the listener for its family each time.
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
        """Answer 503, and close later: closed with its request unread, the client sees a reset."""
        now = time.monotonic()
        self.close_refused(now, most=MAX_LINGERING - 1)
        send_refusal(fd, text)
        self._refused.append((now + LINGER_SECONDS, fd))

    def close_refused(self, now: float, most: int = MAX_LINGERING) -> None:
        """Close those that have had time to read their answer, and the oldest beyond `most`."""
        while self._refused and (self._refused[0][0] <= now or len(self._refused) > most):
            close_unread(self._refused.popleft()[1])

    def look(self, now: float) -> None:
        """Take note of what the shards have taken."""
        for inbox in self._inboxes:
            taken = self._scoreboard[inbox.index][Field.CONNECTIONS]
            if taken != inbox.taken:
                inbox.taken, inbox.progressed_at = taken, now

    def hung(self, now: float) -> int:
        """Count the shards that have not taken what they were passed."""
        return sum(_is_hung(inbox, now) for inbox in self._inboxes)

    def place(self, wanted: int, now: float) -> None:
        """Pass connections to the shards, as far as these can take them; `wanted` are to share."""
        self._take_back_from_hung(now)
        if self._waiting:
            size = self._in_message
            window = size * WINDOW_MESSAGES
            for inbox, batch in self._share_out(self._open_inboxes(now, window), wanted, window):
                self._pass_on(inbox, _parts(batch, size), now)

    def due(self, *, is_placing: bool) -> float | None:
        """Return when `place` has something to do, on the monotonic clock."""
        now = time.monotonic()
        moments = [self._closed_until] if self._closed_until > now else []
        moments += [until for until, _ in itertools.islice(self._refused, 1)]
        if is_placing and any(inbox.outstanding for inbox in self._inboxes):
            moments.append(now + PATIENCE_SECONDS)
        rows = self._scoreboard.shard_counters()
        if is_placing and self._waiting and any(row.is_serving for row in rows):
            # Less often while no shard takes anything.
            since = now - max(inbox.progressed_at for inbox in self._inboxes)
            moments.append(now + min(max(PLACE_SECONDS, since / 8), MAX_PLACE_SECONDS))
        return min(moments, default=None)

    def _take_back_from_hung(self, now: float) -> None:
        if not any(inbox.outstanding for inbox in self._inboxes):
            return
        others_wait = any(not inbox.outstanding for inbox in self._open_inboxes(now))
        for inbox in self._inboxes if others_wait else ():
            if _is_hung(inbox, now):
                self._take_back(inbox)
                inbox.closed_until = now + CLOSED_SECONDS

    def _open_inboxes(self, now: float, window: int = 1) -> list[Inbox]:
        """Return the inboxes of the shards that can be passed a connection."""
        found = [one for one in self._inboxes if self._can_take(one) and one.outstanding < window]
        responsive = [inbox for inbox in found if self._is_responsive(inbox, now)]
        return responsive or found

    def _can_take(self, inbox: Inbox) -> bool:
        row = self._scoreboard[inbox.index]
        return row.is_serving and row[Field.OPEN] + inbox.outstanding < self._fds_of_shard

    def _is_responsive(self, inbox: Inbox, now: float) -> bool:
        row = self._scoreboard[inbox.index]
        return inbox.closed_until <= now and row.is_responsive(now_microseconds())

    def _share_out(
        self, inboxes: Sequence[Inbox], wanted: int, window: int
    ) -> Iterable[tuple[Inbox, list[Waiting]]]:
        """Divide the oldest connections among shards by load; none takes more than its share."""
        share = self._share_of_each(wanted, window)
        heap = []
        for inbox in inboxes:
            row = self._scoreboard[inbox.index]
            load = row.load + inbox.outstanding
            heap.append((load >= row[Field.MAX_SESSIONS], load, inbox.index))
        heapq.heapify(heap)
        batches: dict[int, list[Waiting]] = {inbox.index: [] for inbox in inboxes}
        while self._waiting and heap and heap[0][1] < share:
            _, load, index = heapq.heappop(heap)
            batches[index].append(self._waiting.popleft())
            if len(batches[index]) + self._inboxes[index].outstanding < window:
                most = self._scoreboard[index][Field.MAX_SESSIONS]
                heapq.heappush(heap, (load + 1 >= most, load + 1, index))
        return [(self._inboxes[index], batch) for index, batch in batches.items() if batch]

    def _share_of_each(self, wanted: int, most_ahead: int) -> float:
        """Return the load beyond which no shard is passed a connection now."""
        rows = self._scoreboard.shard_counters()
        serving = [row for row in rows if row.is_serving]
        waited = now_microseconds() - self._waiting[0].since
        if len(serving) < wanted and waited < STARTING_SECONDS * MICROSECONDS:
            return -(-(self.load + sum(row.load for row in rows)) // wanted)
        now = time.monotonic()
        in_turn = [
            self._scoreboard[inbox.index].load + inbox.outstanding
            for inbox in self._inboxes
            if self._can_take(inbox)
            and self._is_responsive(inbox, now)
            and self._scoreboard[inbox.index].room
            and not _is_hung(inbox, now)
        ]
        return min(in_turn, default=float("inf")) + most_ahead

    def _pass_on(self, inbox: Inbox, parts: Iterable[list[Waiting]], now: float) -> None:
        if not inbox.outstanding:
            inbox.progressed_at = now
        for part in parts:
            fds = tuple(each.fd for each in part)
            head = {"since": [each.since for each in part], "placed": len(part)}
            message = connection_message(head, fds, part[0].head)
            if send_message(inbox.writing, message):
                inbox.sent += len(part)
                close_all(message.fds)
            else:
                close_all(message.fds[len(fds) :])
                self._put_back(part)

    def shard_exited(self, index: int) -> None:
        """Take back what a shard has not taken, before its successor starts."""
        inbox = self._inboxes[index]
        self._take_back(inbox)
        inbox.sent = inbox.taken = 0
        inbox.closed_until = 0.0

    def _take_back(self, inbox: Inbox) -> None:
        found: list[Waiting] = []
        with contextlib.suppress(EOFError):
            while (message := receive_message(inbox.reading)) is not None:
                inbox.sent -= message.head.get("placed", 0)
                ages, data = message.head["since"], carried_bytes(message)
                found += [Waiting(*one, data) for one in zip(ages, message.fds, strict=False)]
        self._put_back(found)

    def _put_back(self, connections: Iterable[Waiting]) -> None:
        self._waiting.extend(connections)
        self._waiting = deque(sorted(self._waiting, key=lambda each: each.since))

    def stop(self, text: str) -> None:
        """Refuse the connections that wait."""
        for inbox in self._inboxes:
            self._take_back(inbox)
        while self._waiting:
            self._refuse(self._waiting.popleft().fd, text)


def most_at_once(max_fds: int) -> int:
    """Return how many connections are accepted before anything else is done."""
    return min(MAX_AT_ONCE, max_fds // 4)


def _is_hung(inbox: Inbox, now: float) -> bool:
    return bool(inbox.outstanding) and now - inbox.progressed_at >= PATIENCE_SECONDS


def _parts(batch: Iterable[Waiting], size: int) -> Iterator[list[Waiting]]:
    """Divide a batch into messages; a connection that was read from goes alone, with its head."""
    fresh: list[Waiting] = []
    for each in batch:
        if each.head:
            yield [each]
        else:
            fresh.append(each)
    for start in range(0, len(fresh), size):
        yield fresh[start : start + size]
