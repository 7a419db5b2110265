# SPDX-License-Identifier: Apache-2.0
"""`Succession`: when a shard that has died, or had no room to start, is started again.

At once, mostly; later each time when its processes die young again and again. Decisions alone, on
the host's clock.
"""

from __future__ import annotations

from collections import Counter

from ...system.backoff import backoff_seconds

YOUNG_SECONDS = 5.0  # who dies before had no chance to serve
MAX_BACK_OFF_SECONDS = 5.0
FIRST_BACK_OFF_SECONDS = 0.1


class Succession:
    """Which shards are to be started, and when. `now` is monotonic."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._young_deaths: Counter[int] = Counter()  # in a row

    def died(self, index: int, *, lived_seconds: float, now: float) -> None:
        """A shard needs a successor."""
        is_young = lived_seconds < YOUNG_SECONDS
        deaths = self._young_deaths[index] = self._young_deaths[index] + 1 if is_young else 0
        self._due[index] = now + back_off_seconds(deaths)

    def had_no_room(self, index: int, now: float) -> float:
        """The machine had no room for its process; in how many seconds it is tried again."""
        self._young_deaths[index] += 1
        seconds = back_off_seconds(1 + self._young_deaths[index])
        self._due[index] = now + seconds
        return seconds

    def next_due(self) -> float | None:
        """When the next one is to be started; None: all live."""
        return min(self._due.values(), default=None)

    def take_due(self, now: float) -> list[int]:
        """Those that are to be started now."""
        taken = [index for index, due in self._due.items() if due <= now]
        for index in taken:
            del self._due[index]
        return taken

    def cancel(self) -> None:
        """Nobody succeeds any more."""
        self._due.clear()


def back_off_seconds(deaths: int) -> float:
    """How long to wait for a successor after so many young deaths in a row; not for the first."""
    return backoff_seconds(deaths - 1, first=FIRST_BACK_OFF_SECONDS, longest=MAX_BACK_OFF_SECONDS)
