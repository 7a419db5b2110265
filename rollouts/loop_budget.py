# SPDX-License-Identifier: Apache-2.0
"""Limits what one iteration of the event loop does, so that its timers are not late.

    StepBudget       how many steps are sent in one iteration
    ReceiveBudget    how many bytes are received in one iteration

When the environments of 256 episodes answer at once, serving all in one iteration takes 40 ms, and
receiving a megabyte from each takes 200 ms. Steps that are sent a few at a time are also answered a
few at a time. What exceeds the budget of an iteration waits for a later one, in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

ITERATION_SECONDS = 0.002  # CPU time that the steps of one iteration should take
FIRST_STEPS, MAX_STEPS = 8, 64  # of one iteration
MAX_BYTES = 1 << 20  # received in one iteration
RECEIVE_SECONDS = 0.001  # after which an iteration receives only one more message
LEAST_BYTES = 16 << 10  # that a waiting connection is assumed to have


class StepBudget:
    """Lets a few coroutines continue in each iteration of the loop.

    How many follows from what the last iterations cost: a step of a kilobyte takes 0.05 ms, one of
    a megabyte twenty times that, and the cost of a policy is not known beforehand.
    """

    def __init__(
        self,
        steps: int = FIRST_STEPS,
        max_steps: int = MAX_STEPS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._steps = steps
        self._max_steps = max_steps
        self._clock = clock
        self._left = steps
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False
        self._began = 0.0

    async def acquire(self) -> None:
        """Returns at once, or in a later iteration of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._began = self._clock()
            loop = asyncio.get_running_loop()
            loop.call_soon(self._renew, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        now = self._clock()
        self._steps = steps_after(self._steps, now - self._began, self._max_steps)
        self._began = now
        self._left = self._steps
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_scheduled = self._left < self._steps
        if self._is_scheduled:
            loop.call_soon(self._renew, loop)


def steps_after(steps: int, took_seconds: float, max_steps: int) -> int:
    """How many steps the next iteration may serve: fewer at once, more again one by one."""
    if took_seconds > ITERATION_SECONDS:
        return max(1, int(steps * ITERATION_SECONDS / took_seconds))
    return min(max_steps, steps + 1)


class ReceiveBudget:
    """Limits how many bytes, and for how long, one iteration of the loop receives.

    A megabyte takes a quarter of a millisecond to receive, and fifteen times that into memory whose
    pages are new: limited by bytes alone, iterations of a rollout's first seconds took 9 to 14 ms.
    """

    def __init__(
        self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._left_bytes = max_bytes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_scheduled = False
        self._began = 0.0

    @property
    def is_open(self) -> bool:
        """Whether more may be received in this iteration."""
        return self._left_bytes > 0

    def spend(self, size_bytes: int) -> bool:
        """Counts received bytes. Returns False where the caller is to `wait` before it reads on."""
        self._left_bytes -= size_bytes
        if not self._is_scheduled:
            self._is_scheduled = True
            self._began = self._clock()
            asyncio.get_running_loop().call_soon(self._renew)
        elif self._left_bytes > 0 and self._clock() - self._began > RECEIVE_SECONDS:
            self._left_bytes = 0
        return self.is_open

    def wait(self, size_bytes: int, resume: Callable[[], None]) -> None:
        """Calls `resume` in a later iteration, in which about `size_bytes` will be received."""
        self._waiting.append((max(LEAST_BYTES, size_bytes), resume))

    def _renew(self) -> None:
        self._began = self._clock()
        self._left_bytes = left_bytes = self._max_bytes
        while left_bytes > 0 and self._waiting:
            size_bytes, resume = self._waiting.popleft()
            left_bytes -= size_bytes
            resume()
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._renew)
