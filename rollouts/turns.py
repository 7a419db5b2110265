# SPDX-License-Identifier: Apache-2.0
"""A few steps at a time, however many answers have come: between them the loop sees to its timers.

Of 256 episodes whose environments answer at once, all would be served in one turn of the loop,
which then is 40 ms late for everybody else. So each step takes its turn, `AT_ONCE` in one turn of
the loop; what is sent a few at a time is answered a few at a time, too.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 16  # steps of 0.2 ms each


class Turns:
    """Lets `at_once` coroutines pass in each turn of the loop, in the order in which they came."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def take(self) -> None:
        """Returns at once, or in a later turn of the loop."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._begin, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """The next turn of the loop."""
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_due = self._left < self._at_once
        if self._is_due:
            loop.call_soon(self._begin, loop)
