# SPDX-License-Identifier: Apache-2.0
"""Limits how many episodes run, by the memory that each of them holds while it runs.

An episode's memory use is estimated from earlier episodes, because the size of an observation is
unknown until it arrives. So `SCOUTS` episodes start first, and each completed step lets `FOLLOWERS`
more start, with memory reserved for the largest observation so far. (A first observation is often a
small one: when it let all others in, they came to hold three times the limit.) While an episode
runs it is never kept waiting for more, which might be held by others that wait in the same way.

If each step is written to disk at once, an episode holds two observations: the one the policy is
deciding on, and the next one. If whole episodes are kept in memory, the estimate is the largest
episode so far. Until one has ended, their length is unknown and assumed to be `GUESSED_STEPS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

SCOUTS = 8
FOLLOWERS = 3  # that start after each step: hundreds of episodes run after three steps
OBSERVATIONS = 2  # the one being decided on, and the next one
GUESSED_STEPS = 32  # without this guess, the first episodes held six times the limit
MIN_BYTES = 512  # a step is never smaller than its own objects


class ByteBudget:
    """`limit_bytes` of memory that coroutines of one event loop share.

    Waiters are admitted in order. A reservation larger than the whole budget is admitted alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"a budget needs room: {limit_bytes} bytes")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._first = asyncio.Lock()  # held by the first waiter; the lock admits in order
        self._changed = asyncio.Event()

    async def reserve(self, size_bytes: int) -> int:
        """Wait in order of arrival, then reserve and return `size_bytes`, at least `MIN_BYTES`."""
        size_bytes = max(size_bytes, MIN_BYTES)
        async with self._first:
            while self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
                self._changed.clear()
                await self._changed.wait()
            self.used_bytes += size_bytes
        return size_bytes

    def change(self, difference_bytes: int) -> None:
        """Let a reservation grow without waiting, or release bytes if it is negative."""
        self.used_bytes += difference_bytes
        self._changed.set()


# Called with the size in bytes of a step, and of the observation that the step returned.
HoldStep = Callable[[int, int], None]


class ConcurrencyLimit:
    """Delays the start of an episode until there is memory for it."""

    def __init__(self, limit_bytes: int, *, keeps_episodes: bool) -> None:
        self.budget = ByteBudget(limit_bytes)
        self._keeps_episodes = keeps_episodes
        self._permits = asyncio.Semaphore(SCOUTS)  # to begin an episode; permits are not returned
        self._most_bytes = 0
        self._has_ended = False  # whether any episode has ended

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[HoldStep]:
        """Begin an episode once there is memory; call the yielded function after each step."""
        await self._permits.acquire()
        expected_bytes = self._most_bytes
        if self._keeps_episodes and not self._has_ended:  # `SCOUTS` episodes may always run
            most_bytes = max(self._most_bytes, self.budget.limit_bytes // SCOUTS)
            expected_bytes = min(GUESSED_STEPS * self._most_bytes, most_bytes)
        reserved_bytes = await self.budget.reserve(expected_bytes)
        held_bytes = 0

        def hold_step(size_bytes: int, next_bytes: int) -> None:
            nonlocal held_bytes, reserved_bytes
            if self._keeps_episodes:
                held_bytes += size_bytes
            else:
                held_bytes = max(held_bytes, OBSERVATIONS * max(size_bytes, next_bytes))
            if held_bytes > reserved_bytes:
                self.budget.change(held_bytes - reserved_bytes)
                reserved_bytes = held_bytes
            self._most_bytes = max(self._most_bytes, held_bytes)  # the estimate for other episodes
            if self._permits.locked():
                for _ in range(FOLLOWERS):
                    self._permits.release()

        try:
            yield hold_step
        finally:
            self.budget.change(-reserved_bytes)
            self._has_ended = True
            self._permits.release()  # it may have ended before its first step
