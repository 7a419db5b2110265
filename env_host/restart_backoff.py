# SPDX-License-Identifier: Apache-2.0
"""When a process that has exited, or could not be started, is started again: decisions alone.

At once, mostly; later each time when its processes exit early again and again.
"""

from __future__ import annotations

from collections import Counter

from ..system.process.backoff import backoff_seconds

EARLY_SECONDS = 5.0  # a process that exits sooner counts as an early exit
MAX_BACKOFF_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.1


class RestartSchedule:
    """Which shards are to be started, and when. `now` is monotonic."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._early_exits: Counter[int] = Counter()  # in a row, by shard

    def exited(self, index: int, *, seconds: float, now: float) -> None:
        """Schedule the restart of a shard that has exited after so many seconds."""
        is_early = seconds < EARLY_SECONDS
        count = self._early_exits[index] = self._early_exits[index] + 1 if is_early else 0
        self._due[index] = now + restart_delay_seconds(count)

    def could_not_start(self, index: int, now: float) -> float:
        """Schedule another attempt to start a shard; returns in how many seconds."""
        self._early_exits[index] += 1
        seconds = restart_delay_seconds(1 + self._early_exits[index])
        self._due[index] = now + seconds
        return seconds

    @property
    def scheduled(self) -> frozenset[int]:
        """The shards that are to be started at a later time."""
        return frozenset(self._due)

    def next_due(self) -> float | None:
        """Return when the next shard is to be started; None when none is."""
        return min(self._due.values(), default=None)

    def take_due(self, now: float) -> list[int]:
        """Return the shards that are to be started now, and forget them."""
        taken = [index for index, due in self._due.items() if due <= now]
        for index in taken:
            del self._due[index]
        return taken

    def cancel(self) -> None:
        """Forget all restarts."""
        self._due.clear()


def restart_delay_seconds(early_exits: int) -> float:
    """Return how long to wait after so many early exits in a row; the first costs nothing."""
    return backoff_seconds(
        early_exits - 1, first=FIRST_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS
    )
