# SPDX-License-Identifier: Apache-2.0
"""How many shards are wanted for the sessions there are: decisions alone.

One comes with the replica. Each further session or connection that waits wants one more, up to
what was planned, at once: a fork takes milliseconds. They are given back when for
`LINGER_SECONDS` fewer were wanted, so that sessions that come and go fork nothing. The last one
is given back only of a replica that nobody has connected to yet, whose shard has nothing in memory
that a client might want to find again.
"""

from __future__ import annotations

LINGER_SECONDS = 30.0


class ShardDemand:
    """The number of shards that are wanted. `now` is monotonic."""

    def __init__(self, most: int, least: int = 1) -> None:
        self._most = most
        self.least = least
        self._needed = self.wanted = max(1, least)
        self._since = 0.0  # when `_needed` was first the most that was wanted

    def keep_one(self) -> None:
        """Never give the last one back from now on."""
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
