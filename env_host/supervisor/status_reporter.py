# SPDX-License-Identifier: Apache-2.0
"""Reports to the shim: how many sessions there are, how full all shards are, what has exited.

`/capacity`, which the agents of engines read, also shows exits and failures to create environments.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ipc.reports import blocked_seconds, capacity_of, summary_of
from ..ipc.scoreboard import Field, Scoreboard, now_microseconds

if TYPE_CHECKING:
    from ...schema.replica import Capacity
    from ..ipc.reports import Notifier

SESSIONS_SECONDS = 0.05  # between two reports of the number of sessions
CAPACITY_SECONDS = 5.0  # between two reports of how full all shards are
KEPT = 8  # exits that `/capacity` shows


class StatusReporter:
    """Reports what has changed, at a bounded rate; exits at once."""

    def __init__(self, scoreboard: Scoreboard, notifier: Notifier) -> None:
        self._scoreboard = scoreboard
        self._notifier = notifier
        self._sessions_reported_at = 0.0
        self._capacity_reported_at = 0.0
        self._capacity: Capacity | None = None
        self._is_settled = False  # reported since the last shard fell idle
        self._exits = 0
        self._last_exits: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._left: list[dict[str, Any]] = []  # programs that sessions have left running
        self._show()

    @property
    def sessions(self) -> int:
        """The number of sessions of all shards."""
        return sum(counters[Field.SESSIONS] for counters in self._scoreboard)

    def due(self) -> float | None:
        """Return when `report` has something to do, on the monotonic clock; None while all idle."""
        capacity = self._capacity_reported_at + CAPACITY_SECONDS
        if self.sessions != self._notifier.reported:
            return min(capacity, self._sessions_reported_at + SESSIONS_SECONDS)
        self._is_settled = self._is_settled and self._is_idle
        return None if self._is_settled else capacity

    def report_at_once(self) -> None:
        """Report all with the next `report`."""
        self._is_settled, self._capacity_reported_at = False, 0.0

    @property
    def _is_idle(self) -> bool:
        rows = (row for row in self._scoreboard if row[Field.PID] > 0)
        return all(row[Field.IDLE] and not row[Field.ABANDONED] for row in rows)

    def report(self, find_left: Callable[[], list[dict[str, Any]]]) -> None:
        """Report what is due; `find_left` finds what sessions have left, while there are none."""
        now, sessions = time.monotonic(), self.sessions
        is_due = now - self._sessions_reported_at >= SESSIONS_SECONDS
        if sessions != self._notifier.reported and is_due:
            self._sessions_reported_at = now
            if self._notifier.report_if_room(sessions=sessions):
                self._notifier.reported = sessions
        if now - self._capacity_reported_at >= CAPACITY_SECONDS:
            self._capacity_reported_at = now
            left = [] if sessions else find_left()
            if not sessions and left != self._left:
                self._left = left
                self._show()
            self._is_settled = self._is_idle and not left
            self._report_capacity(left)

    def _report_capacity(self, left: list[dict[str, Any]]) -> None:
        now = now_microseconds()
        summary = summary_of(capacity_of(self._scoreboard, now))
        summary["left"] = left
        rows = self._scoreboard
        if blocked := max(blocked_seconds(row, now) for row in rows):
            summary["held_since"] = round(time.time() - blocked)  # a duration would become stale
        if summary != self._capacity:
            self._capacity = summary
            self._notifier.report_if_room(capacity=summary)

    def report_exit(self, facts: dict[str, Any]) -> None:
        """Report one exit; `/capacity` shows it together with the last ones before it."""
        self._exits += 1
        facts = {**facts, "number": self._exits, "at": time.time()}
        self._last_exits.append(facts)
        self._notifier.report(shard_exit=facts)
        self._show()

    def note_failure(self, cause: str | None) -> None:
        """Report why an environment could not be created; None: one could."""
        self._notifier.sessions_fail(cause)
        self._show()

    def _show(self) -> None:
        self._scoreboard.write_news(list(self._last_exits), self._left, self._notifier.failure)
