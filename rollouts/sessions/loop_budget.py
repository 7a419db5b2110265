# SPDX-License-Identifier: Apache-2.0
"""So many bytes at a time, however many have come: between them the loop sees to its timers.

Of 256 sessions whose answers of a megabyte come at once, each is readable in the same turn of the
loop, which then is 200 ms late for everybody else. So `AT_ONCE_BYTES` are received in one turn, and
in one that has taken `AT_ONCE_SECONDS`, whatever for, only one message more. The connections that
have something after that take a taste of it, and are not read from until it is their turn. See
`turns` for what is sent.

A megabyte takes a quarter of a millisecond to receive, and fifteen times that into memory whose
pages are new (on a virtual machine whose host has to find them): by bytes alone, turns of the first
seconds of a rollout took 9 to 14 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from ...system.units import MB

AT_ONCE_BYTES = MB  # what a turn of the loop receives
AT_ONCE_SECONDS = 0.001  # of a turn, from its begin
LEAST_BYTES = 16 << 10  # what somebody who waits is taken to have


class Intake:
    """Lets `at_once_bytes` pass in each turn of the loop, in the order in which they came."""

    def __init__(
        self, at_once_bytes: int = AT_ONCE_BYTES, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._at_once_bytes = at_once_bytes
        self._clock = clock
        self._left_bytes = at_once_bytes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_due = False
        self._began = 0.0

    @property
    def is_open(self) -> bool:
        """Whether more may be received in this turn."""
        return self._left_bytes > 0

    def admits(self, size_bytes: int) -> bool:
        """So much was received. Whether more may be now; otherwise it is to `wait`."""
        self._left_bytes -= size_bytes
        if not self._is_due:
            self._is_due = True
            self._began = self._clock()
            asyncio.get_running_loop().call_soon(self._begin)
        elif self._left_bytes > 0 and self._clock() - self._began > AT_ONCE_SECONDS:
            self._left_bytes = 0
        return self.is_open

    def wait(self, size_bytes: int, go_on: Callable[[], None]) -> None:
        """`go_on` is called in a later turn; about so much is to come then."""
        self._waiting.append((max(LEAST_BYTES, size_bytes), go_on))

    def _begin(self) -> None:
        """The next turn."""
        self._began = self._clock()
        self._left_bytes = left_bytes = self._at_once_bytes
        while left_bytes > 0 and self._waiting:
            size_bytes, go_on = self._waiting.popleft()
            left_bytes -= size_bytes
            go_on()
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._begin)
