# SPDX-License-Identifier: Apache-2.0
"""Back-off: decides how long to wait before a repeated failure is tried again.

`RestartSchedule` decides when to restart a process that has exited or could not be started: usually
at once, but after a longer delay each time if it keeps exiting early.
"""

from __future__ import annotations

from collections import Counter

EARLY_SECONDS = 5.0  # a process that exits sooner counts as an early exit
MAX_BACKOFF_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.1


class RestartSchedule:
    """The processes, by number, that have to be started, and when. `now` is monotonic."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._early_exits: Counter[int] = Counter()  # in a row

    def exited(self, index: int, *, seconds: float, now: float) -> None:
        """Schedule the restart of a process that exited `seconds` after its start."""
        is_early = seconds < EARLY_SECONDS
        count = self._early_exits[index] = self._early_exits[index] + 1 if is_early else 0
        self._due[index] = now + restart_delay_seconds(count)

    def could_not_start(self, index: int, now: float) -> float:
        """Schedule another attempt to start a process; returns in how many seconds."""
        self._early_exits[index] += 1
        seconds = restart_delay_seconds(1 + self._early_exits[index])
        self._due[index] = now + seconds
        return seconds

    @property
    def scheduled(self) -> frozenset[int]:
        """The processes that are to be started at a later time."""
        return frozenset(self._due)

    def next_due(self) -> float | None:
        """Return when to start the next process; None if none is scheduled."""
        return min(self._due.values(), default=None)

    def take_due(self, now: float) -> list[int]:
        """Return the processes that are to be started now, and forget them."""
        taken = [index for index, due in self._due.items() if due <= now]
        for index in taken:
            del self._due[index]
        return taken

    def cancel(self) -> None:
        """Drop all restarts."""
        self._due.clear()


def restart_delay_seconds(early_exits: int) -> float:
    """Return how long to wait after `early_exits` in a row; there is no wait after the first."""
    return backoff_seconds(
        early_exits - 1, first=FIRST_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS
    )


_MAX_DOUBLINGS = 30  # any `longest` is reached before this; it keeps the power small


def backoff_seconds(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `failures` in a row: `first`, doubled for each one more."""
    if failures <= 0:
        return 0.0
    return float(min(first * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), longest))
