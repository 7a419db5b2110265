# SPDX-License-Identifier: Apache-2.0
"""Reports to the shim how many sessions there are, and how full all shards are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...system.text.units import MB
from ..ipc.reports import abandoned_steps, blocked_seconds, shard_of, summary_of
from ..ipc.scoreboard import Field, Scoreboard, now_microseconds
from .memory import private_bytes

if TYPE_CHECKING:
    from ...schema.replica import Capacity
    from ..ipc.reports import Notifier

SESSIONS_SECONDS = 0.05  # between two reports of the number of sessions
CAPACITY_SECONDS = 5.0  # between two reports of how full all shards are
MAX_MEASURED = 4  # processes of isolated sessions whose memory says what one costs


class StatusReporter:
    """Reports what has changed, at a bounded rate."""

    def __init__(
        self,
        scoreboard: Scoreboard,
        notifier: Notifier,
        find_left: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """Make one; `find_left` looks for what sessions have left behind, while there are none."""
        self._scoreboard = scoreboard
        self._notifier = notifier
        self._find_left = find_left
        self._sessions_reported_at = 0.0
        self._capacity_reported_at = 0.0
        self._capacity: Capacity | None = None
        self._is_settled = False  # reported since the last shard fell idle
        self._session_bytes: int | None = None  # of an isolated session, when last there was one

    @property
    def sessions(self) -> int:
        """The number of sessions of all shards."""
        return sum(counters[Field.SESSIONS] for counters in self._scoreboard.shard_counters())

    def due(self) -> float | None:
        """Return when `report` has something to do, on the monotonic clock; None while all idle."""
        capacity = self._capacity_reported_at + CAPACITY_SECONDS
        if self.sessions != self._notifier.reported:
            return min(capacity, self._sessions_reported_at + SESSIONS_SECONDS)
        self._is_settled = self._is_settled and self._is_idle
        return None if self._is_settled else capacity

    def unsettle(self) -> None:
        """Report again, also when all are idle."""
        self._is_settled = False

    def report_at_once(self) -> None:
        """Report all with the next `report`."""
        self._is_settled, self._capacity_reported_at = False, 0.0

    @property
    def _is_idle(self) -> bool:
        return all(row[Field.IDLE] for row in self._scoreboard.shard_counters() if row[Field.PID])

    def report(self) -> None:
        """Report what is due."""
        now = time.monotonic()
        if (
            self.sessions != self._notifier.reported
            and now - self._sessions_reported_at >= SESSIONS_SECONDS
        ):
            self._sessions_reported_at = now
            self._notifier.sessions(self.sessions)
        if now - self._capacity_reported_at >= CAPACITY_SECONDS:
            self._capacity_reported_at = now
            left = [] if self.sessions else self._find_left()
            self._is_settled = self._is_idle and not left
            self._report_capacity(left)

    def _report_capacity(self, left: list[dict[str, Any]]) -> None:
        summary = summary_of(self._scoreboard, now_microseconds())
        if (blocked := blocked_seconds(self._scoreboard, now_microseconds())) is not None:
            summary["held_since"] = round(time.time() - blocked)  # the reader reads it later
        shards = [shard_of(row, now_microseconds()) for row in self._scoreboard.shard_counters()]
        summary["abandoned"] = abandoned_steps(shards, time.time())
        summary["left"] = left
        if sizes := [size for pid in self._isolated_pids() if (size := private_bytes(pid))]:
            self._session_bytes = round(sum(sizes) / len(sizes) / MB) * MB
        if self._session_bytes is not None:
            summary["isolated_session_bytes"] = self._session_bytes
        if summary != self._capacity:
            self._capacity = summary
            self._notifier.capacity(summary)

    def _isolated_pids(self) -> list[int]:
        rows = (row for row in self._scoreboard if row[Field.ISOLATED] and row[Field.SESSIONS])
        return [counters[Field.PID] for counters in itertools.islice(rows, MAX_MEASURED)]
