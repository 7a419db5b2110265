# SPDX-License-Identifier: Apache-2.0
"""A semaphore that counts bytes: memory that several coroutines of one event loop share.

Those who wait are admitted in order. Something larger than all of it passes alone.
"""

from __future__ import annotations

import asyncio
from collections import deque

LEAST_BYTES = 512  # a step is never smaller than its own objects


class ByteBudget:
    """`limit_bytes` of memory, of one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"a budget needs room: {limit_bytes} bytes")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reserve(self, size_bytes: int) -> Hold:
        """Room for `size_bytes`, waited for in line."""
        size_bytes = max(size_bytes, LEAST_BYTES)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._admit()  # who waited behind it
            else:
                self.change(-size_bytes)
            raise
        return Hold(self, size_bytes)

    def change(self, difference_bytes: int) -> None:
        """Adds the bytes that a hold took, or subtracts those that it released."""
        self.used_bytes += difference_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._admit()

    def _admit(self) -> None:
        """Let in whom there is room for, in order."""
        while self._waiting:
            size_bytes, admitted = self._waiting[0]
            if not admitted.cancelled():
                if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
                    return
                self.used_bytes += size_bytes
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                admitted.set_result(None)
            self._waiting.popleft()


class Hold:
    """Room in a budget, or in none, until it is released; twice is once."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: ByteBudget | None, size_bytes: int) -> None:
        self._budget = budget
        self.size_bytes = size_bytes

    def resize(self, size_bytes: int) -> None:
        """To what it really became. Never waits: those in line wait a little longer instead."""
        size_bytes = max(size_bytes, LEAST_BYTES)
        if self._budget is not None and size_bytes != self.size_bytes:
            difference_bytes, self.size_bytes = size_bytes - self.size_bytes, size_bytes
            self._budget.change(difference_bytes)

    def release(self) -> None:
        """Give it back."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.change(-self.size_bytes)
