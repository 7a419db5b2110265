# SPDX-License-Identifier: Apache-2.0
"""`Distributor`: passes the accepted connections of a replica on to its shards.

    `Backlog` ──the oldest first──▶ inbox of a shard ──one message per iteration──▶ shard
        └◀───────── taken back ◀─────── not read in time

Accepting is separate from serving, because the kernel's queues are short. A connection that finds
its queue full is dropped, and retried after 1, 3 and 7 s. A shard that also answers connections
cannot empty the queues in time when thousands arrive at once; accepting alone takes microseconds.

A connection goes to the shard with the fewest sessions that has room. When none has room, it goes
to the one with the fewest, which answers HTTP and lets a session wait (`shard/admission.py`).
At most `WINDOW_MESSAGES` are in the inbox of a shard. They are small, and the shard reads one per
loop iteration, so it takes connections at the rate at which it serves, and most of them can be
taken back when it hangs. On the scoreboard it counts the connections that it has taken. Reasons:
`docs/decisions/0023-accept-apart-from-serving.md`.

What happens when

    a shard hangs           what it has not taken in `PATIENCE_SECONDS` is taken back as soon as
                            another shard has nothing to take; the hung one gets none for a while
    a shard exits           what it has not taken goes to the others, or waits for its successor
    all shards are busy     connections wait here; a client that leaves is noticed by its shard
"""

from __future__ import annotations

import contextlib
import heapq
import socket
import time
from collections.abc import Iterable, Iterator, Sequence

from ...system.process.descriptors import MAX_FDS, close_all, receive_message, send_message
from ..ipc.fd_messages import Unanswered, connection_message, connections_in
from ..ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard, now_microseconds
from ..startup import SPARE_FDS
from .acceptor import Backlog

# A shard takes one message per loop iteration: the others cannot get its connections if it hangs.
# In a crowd messages are larger: handshakes must not wait for the steps of earlier sessions.
MIN_IN_MESSAGE = 16
SHARE_IN_MESSAGE = 1 / 4  # of the connections that wait
WINDOW_MESSAGES = 4  # at most, that were passed to a shard and that it has not taken yet
PLACE_SECONDS = 0.001  # between two looks at the shards while connections wait
MAX_PLACE_SECONDS = 0.05  # while none of them takes any
PATIENCE_SECONDS = 0.25  # for a shard to take a connection, before another may get it
CLOSED_SECONDS = 0.5  # that a shard gets no connection, after some were taken back from it
STARTING_SECONDS = 0.5  # that connections wait for a shard that is wanted and does not serve yet


class Inbox:
    """A pair of sockets through which a shard gets connections; the supervisor has both."""

    def __init__(self, index: int, ends: tuple[socket.socket, socket.socket]) -> None:
        self.index = index
        self.reading, self.writing = ends
        self.sent = 0  # to the current process of the shard
        self.taken = 0  # of these, when the scoreboard was last read
        self.progressed_at = 0.0  # when `taken` last grew, or the first was sent
        self.closed_until = 0.0

    @property
    def outstanding(self) -> int:
        """Return how many connections the shard had not taken when last looked."""
        return self.sent - self.taken


class Distributor:
    """Owns the inboxes of the shards. On the supervisor's thread."""

    def __init__(
        self,
        backlog: Backlog,
        scoreboard: Scoreboard,
        pairs: Sequence[tuple[socket.socket, socket.socket]],
        *,
        max_fds: int,
    ) -> None:
        self._backlog = backlog
        self._scoreboard = scoreboard
        self._inboxes = [Inbox(index, ends) for index, ends in enumerate(pairs)]
        self._fds_of_shard = max(1, max_fds - SPARE_FDS)

    @property
    def load(self) -> int:
        """The connections that wait in the backlog, or in the inbox of a shard."""
        return len(self._backlog.waiting) + sum(inbox.outstanding for inbox in self._inboxes)

    def has_passed_on(self, row: Counters) -> bool:
        """Return whether a shard has, or will have, connections."""
        return bool(row.load or row[Field.OPEN] or self._inboxes[row.index].outstanding)

    def due(self) -> float | None:
        """Return when `place` has something to do, on the monotonic clock."""
        now = time.monotonic()
        moments = []
        if any(inbox.outstanding for inbox in self._inboxes):
            moments.append(now + PATIENCE_SECONDS)
        rows = self._scoreboard
        if self._backlog.waiting and any(row.is_serving for row in rows):
            # Less often while no shard takes anything.
            since = now - max(inbox.progressed_at for inbox in self._inboxes)
            moments.append(now + min(max(PLACE_SECONDS, since / 8), MAX_PLACE_SECONDS))
        return min(moments, default=None)

    def take_back_all(self) -> None:
        """Put everything that shards have not taken back into the backlog."""
        for inbox in self._inboxes:
            self._take_back(inbox)

    def update(self, now: float) -> None:
        """Read from the scoreboard what the shards have taken."""
        for inbox in self._inboxes:
            taken = self._scoreboard[inbox.index][Field.CONNECTIONS]
            if taken != inbox.taken:
                inbox.taken, inbox.progressed_at = taken, now

    def count_hung(self, now: float) -> int:
        """Count the shards that have not taken what they were passed."""
        return sum(_is_hung(inbox, now) for inbox in self._inboxes)

    def place(self, wanted: int, now: float) -> None:
        """Pass connections to the shards that can take them; `wanted` shards divide the load."""
        if any(inbox.outstanding for inbox in self._inboxes):
            others_wait = any(not inbox.outstanding for inbox in self._open_inboxes(now))
            for inbox in self._inboxes if others_wait else ():
                if _is_hung(inbox, now):
                    self._take_back(inbox)
                    inbox.closed_until = now + CLOSED_SECONDS
        if self._backlog.waiting:
            size = int(len(self._backlog.waiting) * SHARE_IN_MESSAGE)
            size = max(MIN_IN_MESSAGE, min(MAX_FDS, size))
            window = size * WINDOW_MESSAGES
            for inbox, batch in self._assign(self._open_inboxes(now, window), wanted, window):
                self._pass_on(inbox, _parts(batch, size), now)

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

    def _assign(
        self, inboxes: Sequence[Inbox], wanted: int, window: int
    ) -> Iterable[tuple[Inbox, list[Unanswered]]]:
        """Divide the oldest connections among shards by load; none takes more than its share."""
        share = self._max_load(wanted, window)
        heap = []
        for inbox in inboxes:
            row = self._scoreboard[inbox.index]
            load = row.load + inbox.outstanding
            heap.append((load >= row[Field.MAX_SESSIONS], load, inbox.index))
        heapq.heapify(heap)
        batches: dict[int, list[Unanswered]] = {inbox.index: [] for inbox in inboxes}
        while self._backlog.waiting and heap and heap[0][1] < share:
            _, load, index = heapq.heappop(heap)
            batches[index].append(self._backlog.waiting.popleft())
            if len(batches[index]) + self._inboxes[index].outstanding < window:
                most = self._scoreboard[index][Field.MAX_SESSIONS]
                heapq.heappush(heap, (load + 1 >= most, load + 1, index))
        return [(self._inboxes[index], batch) for index, batch in batches.items() if batch]

    def _max_load(self, wanted: int, most_ahead: int) -> float:
        """Return the load beyond which no shard is passed a connection now."""
        rows = self._scoreboard
        serving = [row for row in rows if row.is_serving]
        waited = now_microseconds() - self._backlog.waiting[0].since
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

    def _pass_on(self, inbox: Inbox, parts: Iterable[list[Unanswered]], now: float) -> None:
        if not inbox.outstanding:
            inbox.progressed_at = now
        for part in parts:
            message = connection_message(part, placed=len(part))
            if send_message(inbox.writing, message):
                inbox.sent += len(part)
                close_all(message.fds)
            else:
                close_all(message.fds[len(part) :])
                self._backlog.put_back(part)

    def shard_exited(self, index: int) -> None:
        """Take back what a shard has not taken, before its successor starts."""
        inbox = self._inboxes[index]
        self._take_back(inbox)
        inbox.sent = inbox.taken = 0
        inbox.closed_until = 0.0

    def _take_back(self, inbox: Inbox) -> None:
        found: list[Unanswered] = []
        with contextlib.suppress(EOFError):
            while (message := receive_message(inbox.reading)) is not None:
                inbox.sent -= message.head.get("placed", 0)
                found += connections_in(message)
        self._backlog.put_back(found)


def _is_hung(inbox: Inbox, now: float) -> bool:
    return bool(inbox.outstanding) and now - inbox.progressed_at >= PATIENCE_SECONDS


def _parts(batch: Iterable[Unanswered], size: int) -> Iterator[list[Unanswered]]:
    """Divide a batch into messages; a connection that was read from goes alone, with its head."""
    fresh: list[Unanswered] = []
    for each in batch:
        if each.data:
            yield [each]
        else:
            fresh.append(each)
    for start in range(0, len(fresh), size):
        yield fresh[start : start + size]
