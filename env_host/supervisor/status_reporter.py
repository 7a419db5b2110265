# SPDX-License-Identifier: Apache-2.0
"""What the host tells its shim of the board: how many sessions, and how full all of it is."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from ..ipc.capacity import held_seconds, summary_of
from ..ipc.scoreboard import Field, Scoreboard, now_microseconds
from .session_memory import mean_own_bytes

if TYPE_CHECKING:
    from ..ipc.notify import Notifier

TELL_SECONDS = 0.05  # between two numbers of sessions told
TELL_CAPACITY_SECONDS = 5.0  # between two looks at how full all of it is
MOST_LOOKED_AT = 4  # processes of isolated sessions, whose memory tells what one costs


class News:
    """Tells what has changed, and not too often."""

    def __init__(self, scoreboard: Scoreboard, notifier: Notifier) -> None:
        self._scoreboard = scoreboard
        self._notifier = notifier
        self._told_at = 0.0
        self._capacity_told_at = 0.0
        self._capacity: dict[str, Any] | None = None
        self._session_bytes: int | None = None  # of an isolated session, when last there was one

    @property
    def sessions(self) -> int:
        """How many there are."""
        return sum(counters[Field.SESSIONS] for counters in self._scoreboard.shard_counters())

    def due(self) -> float:
        """When `tell` has something to do, on the monotonic clock."""
        capacity = self._capacity_told_at + TELL_CAPACITY_SECONDS
        return min(capacity, self._told_at + TELL_SECONDS) if self._has_changed() else capacity

    def tell(self) -> None:
        """Tell what is due."""
        now = time.monotonic()
        if self._has_changed() and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            self._notifier.sessions(self.sessions)
        if now - self._capacity_told_at >= TELL_CAPACITY_SECONDS:
            self._tell_capacity(now)

    def _tell_capacity(self, now: float) -> None:
        self._capacity_told_at = now
        summary = summary_of(self._scoreboard, now_microseconds())
        if (held := held_seconds(self._scoreboard, now_microseconds())) is not None:
            summary["held_since"] = round(time.time() - held)  # whoever is told reads it later
        if (measured := mean_own_bytes(self._isolated_pids())) is not None:
            self._session_bytes = measured
        if self._session_bytes is not None:
            summary["isolated_session_bytes"] = self._session_bytes
        if summary != self._capacity:
            self._capacity = summary
            self._notifier.capacity(summary)

    def _isolated_pids(self) -> list[int]:
        slots = (s for s in self._scoreboard if s[Field.ISOLATED] and s[Field.SESSIONS])
        return [counters[Field.PID] for counters in itertools.islice(slots, MOST_LOOKED_AT)]

    def _has_changed(self) -> bool:
        return self.sessions != self._notifier.told
