# SPDX-License-Identifier: Apache-2.0
"""So many bytes at a time, however many have come: between them the loop sees to its timers.

Of 256 sessions whose answers of a megabyte come at once, each is readable in the same turn of the
loop, which then is 200 ms late for everybody else. So what comes is looked at in `AT_ONCE_BYTES` in
one turn; connections whose data waits are not read from meanwhile. See `turns` for what is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE_BYTES = 128 << 10  # what a turn of the loop receives at least; a fifth of a millisecond


class Intake:
    """Lets `at_once_bytes` pass in each turn of the loop, in the order in which they came."""

    def __init__(self, at_once_bytes: int = AT_ONCE_BYTES) -> None:
        self._at_once_bytes = at_once_bytes
        self._left_bytes = at_once_bytes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_due = False

    def admits(self, size_bytes: int) -> bool:
        """Whether so much may be looked at now; otherwise it is to `wait`."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin)
        if self._left_bytes <= 0 or self._waiting:
            return False
        self._left_bytes -= size_bytes
        return True

    def wait(self, size_bytes: int, take: Callable[[], None]) -> None:
        """`take` is called in a later turn."""
        self._waiting.append((size_bytes, take))

    def _begin(self) -> None:
        """The next turn of the loop."""
        self._left_bytes = self._at_once_bytes
        while self._left_bytes > 0 and self._waiting:
            size_bytes, take = self._waiting.popleft()
            self._left_bytes -= size_bytes
            take()
        self._is_due = self._left_bytes < self._at_once_bytes
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._begin)
