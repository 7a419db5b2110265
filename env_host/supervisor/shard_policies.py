# SPDX-License-Identifier: Apache-2.0
"""Decides when shards are started, stopped and replaced, and when a replica sleeps; no effects.

One shard starts with the replica. Each further session or waiting connection adds one at once, up
to the planned number: a fork takes milliseconds. Shards are stopped when fewer were needed for
`LINGER_SECONDS`, so that short sessions do not fork again and again. The last shard is stopped only
if no client has connected to the replica yet: its memory may hold what a client wants to find
again.

A step is abandoned when it runs although its session has ended:

    its session timed out, or its client left; a thread cannot be interrupted
      ├─ it returns                             nothing is done
      ├─ no other session is in the shard       replaced, once the step has run for a while
      └─ others are, and their loop is blocked  replaced at once: their clients get the reason

A step that does not release the interpreter (a regular expression, C code) blocks the loop, which
then notices no time-out and no client that leaves. The supervisor notices instead:

    the loop has not run for a while      the stacks of the process are logged
      ├─ for longer than the calls' limit replaced at once: a call that has this limit is in it
      ├─ all clients have left, or wait   replaced at once: no client expects an answer
      └─ otherwise                        nothing is done: the step may take as long as it wants

A replica sleeps when it was not used for its idle time. Any connection is use, whatever is sent
through it. A shard with a connection is not idle; a shard records when it was last busy. A
connection that no shard has taken is in the backlog.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ..ipc.reports import abandoned_seconds, blocked_seconds
from ..ipc.scoreboard import MICROSECONDS, Counters, Field

LINGER_SECONDS = 30.0
POLL_SECONDS = 1.0  # between two looks for shards to replace, while sessions are served
PATIENCE_SECONDS = 10.0  # that an abandoned step may take in all, and that a loop may be blocked
SETTLE_SECONDS = 0.2  # until the connections that were accepted last are with their shards


class ShardDemand:
    """The number of shards that are wanted. `now` is monotonic."""

    def __init__(self, most: int, least: int = 1) -> None:
        self._most = most
        self.least = least
        self._needed = self.wanted = max(1, least)
        self._since = 0.0  # when `_needed` was first the most that was wanted

    def keep_one(self) -> None:
        """Keep at least one shard from now on."""
        self.least = max(1, self.least)

    def update(self, load: int, now: float) -> int:
        """Return how many shards are wanted for `load` sessions and waiting connections."""
        needed = max(self.least, min(self._most, load))
        self._needed = max(self._needed, needed)
        if self._needed >= self.wanted or now - self._since >= LINGER_SECONDS:
            self.wanted = self._needed
            self._needed, self._since = needed, now
        return self.wanted

    def due(self) -> float | None:
        """Return when fewer may be wanted; None when there are as few as can be."""
        return None if self.wanted == self.least else self._since + LINGER_SECONDS


class Replacement(Enum):
    """The decision about a shard; if it is replaced at once, also what its clients are sent."""

    NONE = "none"
    WHEN_IDLE = "when idle"  # it has no other session: none is lost
    STARVED = "was replaced, since an abandoned call kept its other sessions waiting"
    OVERDUE = "was replaced, since a step blocked it for longer than --step-timeout"
    LEFT = "was replaced, since a step blocked it and all of its clients had left"


def replacement_of(
    row: Counters, now: int, limit: float | None, left: int, waiting: int, *, is_exclusive: bool
) -> Replacement:
    """Decide on one shard.

    If it `is_exclusive`, an abandoned session keeps its only slot. Calls that have a time limit may
    take `limit` seconds. The clients of `left` sessions have closed their connections; those of
    `waiting` ones have requests that the shard has not read, so none of their steps blocks it.
    """
    blocked = blocked_seconds(row, now)
    if row[Field.ABANDONED] and abandoned_seconds(row, now) >= PATIENCE_SECONDS:
        others = row.load - (row[Field.ABANDONED] if is_exclusive else 0)
        if blocked:
            return Replacement.STARVED if others > 0 else Replacement.LEFT
        return Replacement.NONE if others > 0 else Replacement.WHEN_IDLE
    if blocked < PATIENCE_SECONDS:
        return Replacement.NONE
    if limit is not None and row[Field.LIMITED] and blocked >= limit:
        return Replacement.OVERDUE
    if not left or left + waiting < row[Field.SESSIONS]:
        return Replacement.NONE
    return Replacement.STARVED if waiting else Replacement.LEFT


class Idleness:
    """Records when a replica was last used. `now` is monotonic."""

    def __init__(self, sleep_after_seconds: float | None) -> None:
        """Without `sleep_after_seconds` the replica never ends by itself."""
        wanted = sleep_after_seconds
        self._seconds = None if wanted is None else max(wanted, SETTLE_SECONDS)
        self._used_at = 0.0

    def due(self) -> float | None:
        """Return when it will have been unused for long enough to end; None: never."""
        return None if self._seconds is None else self._used_at + self._seconds

    def has_settled(self, now: float) -> bool:
        """Return whether it has not been used just now."""
        return now >= self._used_at + SETTLE_SECONDS

    def note_use(self, now: float) -> None:
        """Record that it is used, or has just begun to serve."""
        self._used_at = max(self._used_at, now)

    def note_shards(self, rows: Iterable[Counters], now: float) -> None:
        """Record what the shards have written: whether they are idle, and since when."""
        for row in rows:
            is_idle = row[Field.IDLE] or not row[Field.PID]
            self.note_use(row[Field.HEARTBEAT] / MICROSECONDS if is_idle else now)
