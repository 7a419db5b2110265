# SPDX-License-Identifier: Apache-2.0
"""Which share of the new sessions each replica gets, by the room that it has: pure functions.

Replicas get sessions in turn, each as many, as long as none has less than half the room of another:
so a crowd is split evenly. After scaling up, or when sessions have ended unevenly, those with more
room get more, in powers of two, so that Envoy's files change seldom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_WEIGHT = 16  # of a replica, against one that has no room: that answers, and is passed over
NEARLY_EVEN = 0.5  # the least room against the most, from which all get as many
CALM = 1 / 16  # of a replica's capacity, by which its sessions may change in a moment


@dataclass(frozen=True, slots=True)
class Load:
    """How many sessions a replica has, and how many it can have."""

    sessions: int
    capacity: int

    @property
    def room(self) -> int:
        """How many more it can have."""
        return max(0, self.capacity - self.sessions)


def weights(loads: Mapping[int, Load]) -> dict[int, int]:
    """Return how many sessions replicas get in their turn, by number; empty: as many each."""
    rooms = {number: load.room for number, load in loads.items()}
    most = max(rooms.values(), default=0)
    if min(rooms.values(), default=0) >= NEARLY_EVEN * most:
        return {}
    return {number: _power_of_two(MOST_WEIGHT * room / most) for number, room in rooms.items()}


def is_calm(before: Mapping[int, Load], now: Mapping[int, Load]) -> bool:
    """Whether no crowd is coming or leaving, of which some replicas have told later than others."""
    return all(
        number in before and abs(load.sessions - before[number].sessions) <= CALM * load.capacity
        for number, load in now.items()
    )


def _power_of_two(value: float) -> int:
    """Return the largest that is not greater, and at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)
