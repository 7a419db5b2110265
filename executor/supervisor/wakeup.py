# SPDX-License-Identifier: Apache-2.0
"""What ends the supervisor's wait: a time that has come, or somebody who rings.

Any thread sets and rings; the supervisor thread alone waits, hears and winds it up again.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable

MOST_WAIT_SECONDS = 86_400.0


class Alarm:
    """One alarm with its bell, which a selector waits for."""

    def __init__(self) -> None:
        self._bell, self._button = os.pipe()
        for end in (self._bell, self._button):
            os.set_blocking(end, False)
        self._rung = False
        self._at = math.inf  # no deadline is earlier; under the lock, since all threads set it
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Readable when it has rung."""
        return self._bell

    def ring(self) -> None:
        """Wake the thread up; once is enough until it has woken."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._button, b"!")

    def set(self, deadline: float) -> None:
        """Do not sleep beyond the deadline."""
        with self._lock:
            if deadline >= self._at:
                return
            self._at = deadline
        self.ring()

    def hear(self) -> None:
        """It has rung."""
        # In this order: a ring that comes in between is heard in the next round.
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 64)
        self._rung = False

    def is_due(self, now: float) -> bool:
        """Whether a deadline may have passed."""
        return now >= self._at

    def seconds_left(self, now: float) -> float | None:
        """How long to wait; None for ever."""
        return wait_seconds(self._at, now)

    def wind_up(self, next_deadline: Callable[[], float]) -> None:
        """Wait for the next one.

        Whoever sets a deadline does so before the alarm: it is among those that `next_deadline`
        finds, or comes after.
        """
        with self._lock:
            self._at = next_deadline()

    def close(self) -> None:
        """Nobody waits any more."""
        os.close(self._bell)
        os.close(self._button)


def wait_seconds(alarm: float, now: float) -> float | None:
    """How long to wait for an alarm; None for one that is never. A time-out of a year is no error:
    the kernel's timers end at 2^31 ms, and waking up once too often does nothing.
    """
    return None if alarm == math.inf else min(max(0.0, alarm - now), MOST_WAIT_SECONDS)
