# SPDX-License-Identifier: Apache-2.0
"""A few steps at a time, however many answers have come: between them the loop sees to its timers.

Of 256 episodes whose environments answer at once, all would be served in one turn of the loop,
which then is 40 ms late for everybody else. So each step takes its turn; what is sent a few at a
time is answered a few at a time, too.

How many pass in one turn follows from what the turns before have cost: a step of a kilobyte takes
0.05 ms, one of a megabyte twenty times that, and what a policy does nobody knows beforehand.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_SECONDS = 0.002  # of CPU, that a turn of the loop is to take
FIRST_AT_ONCE = 8
MOST_AT_ONCE = 64


class Turns:
    """Lets a few coroutines pass in each turn of the loop, in the order in which they came."""

    def __init__(
        self,
        at_once: int = FIRST_AT_ONCE,
        most: int = MOST_AT_ONCE,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._at_once = at_once
        self._most = most
        self._clock = clock
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False
        self._began = 0.0

    async def take(self) -> None:
        """Returns at once, or in a later turn of the loop."""
        if not self._is_due:
            self._is_due = True
            self._began = self._clock()
            loop = asyncio.get_running_loop()
            loop.call_soon(self._begin, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """The next turn of the loop."""
        now = self._clock()
        self._at_once = at_once_after(self._at_once, now - self._began, self._most)
        self._began = now
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_due = self._left < self._at_once
        if self._is_due:
            loop.call_soon(self._begin, loop)


def at_once_after(at_once: int, took_seconds: float, most: int) -> int:
    """How many are to pass, after a turn in which `at_once` might have: fewer at once, more again
    one by one."""
    if took_seconds > TURN_SECONDS:
        return max(1, int(at_once * TURN_SECONDS / took_seconds))
    return min(most, at_once + 1)
