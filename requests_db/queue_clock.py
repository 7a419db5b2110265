# SPDX-License-Identifier: Apache-2.0
"""`QueueClock`: the time by which pending requests age.

The wall clock may step, by a day or by years (a laptop that meets its time server), and the
monotonic clock begins anew with each boot. So arrivals are monotonic seconds, counted in each life
of the daemon from the youngest unfinished request's arrival: a later request never has an earlier
arrival, and all that wait age alike. Time without a daemon counts for none of them.
"""

from __future__ import annotations

import time


class QueueClock:
    """Seconds that never step. Any thread may ask."""

    def __init__(self, latest_arrival: float = 0.0) -> None:
        """Goes on from `latest_arrival`, on the clock of an earlier daemon."""
        self._ahead = latest_arrival - time.monotonic()

    def now(self) -> float:
        """The arrival of a request that is written now."""
        return time.monotonic() + self._ahead
