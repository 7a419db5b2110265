# SPDX-License-Identifier: Apache-2.0
"""A budget in bytes for everything between a session and the disk.

    collector ──reserve──▶ Hold ──travels with the step──▶ writer thread ──▶ disk ──▶ release
                  ▲                                                                     │
                  └───────────────── the next in line is admitted ◀─────────────────────┘

A step's room is reserved before it is handed over, and given back when it is on disk: nothing in
between can grow without it. Those who wait are served in order. Something larger than the whole
budget passes alone. Queues between threads need no bound of their own then.

A disk that is slower than the environments fills any budget, and is no faster for it. So a budget
may begin small, and grows only where the disk ran out of work while a step waited for room.

The lock guards the stats and the line of those who wait; it is never held across a wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from ..system.futures import settle, tell_loop

LEAST_BYTES = 512  # a step is never smaller than its own objects


def admits(used_bytes: int, size_bytes: int, limit_bytes: int) -> bool:
    """Whether so much more may come in: what fits, or anything when all is empty."""
    return used_bytes == 0 or used_bytes + size_bytes <= limit_bytes


class ByteBudget:
    """`limit_bytes` of memory, reserved on event loops and released from any thread.

    With `first_bytes` the budget begins smaller, and opens when the consumer is `idle`.
    """

    def __init__(self, limit_bytes: int, first_bytes: int | None = None) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"a budget needs room: {limit_bytes} bytes")
        self.limit_bytes = limit_bytes
        self._open_bytes = min(limit_bytes, first_bytes or limit_bytes)
        self._was_short = False  # a reservation has waited since the consumer was idle
        self._is_idle = False
        self.peak_bytes = 0
        self._used_bytes = 0
        self._waiting: deque[_Waiter] = deque()
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """How many bytes are reserved now."""
        return self._used_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def is_full(self, size_bytes: int) -> bool:
        """Whether a reservation of this size would wait now."""
        return bool(self._waiting) or not admits(self._used_bytes, size_bytes, self._open_bytes)

    async def reserve(self, size_bytes: int) -> Hold:
        """Room for `size_bytes`, waited for in line.

        Raises:
            Exception: what `fail` was given.
        """
        size_bytes = max(size_bytes, LEAST_BYTES)
        waiter = self._admit_or_queue(size_bytes)
        if waiter is not None:
            await self._wait(waiter)
        return Hold(self, size_bytes)

    def fail(self, error: Exception) -> None:
        """Ends the budget: all waiting and later reservations raise `error`."""
        with self._lock:
            self._failure = error
            waiting, self._waiting = list(self._waiting), deque()
        for waiter in waiting:
            waiter.wake(error)

    def idle(self) -> None:
        """Says that the consumer of what was reserved has no more work; from any thread.

        Where a caller has waited since the last time, the budget doubles. Until `busy` it opens as
        far as anybody asks for.
        """
        with self._lock:
            self._is_idle = True
            if self._was_short:
                self._was_short = False
                self._open()
            admitted = self._admit()
        for waiter in admitted:
            waiter.wake()

    def busy(self) -> None:
        """Says that the consumer has work again; from any thread."""
        self._is_idle = False

    def change(self, difference_bytes: int) -> None:
        """Adds the bytes that a hold took, or subtracts those that it released."""
        with self._lock:
            self._used_bytes += difference_bytes
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
            admitted = self._admit()
        for waiter in admitted:
            waiter.wake()

    def _admit_or_queue(self, size_bytes: int) -> _Waiter | None:
        """None: there was room."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._waiting and self._fits(size_bytes):
                self._take(size_bytes)
                return None
            self._was_short = True
            loop = asyncio.get_running_loop()
            waiter = _Waiter(size_bytes, loop, loop.create_future())
            self._waiting.append(waiter)
            return waiter

    async def _wait(self, waiter: _Waiter) -> None:
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: _Waiter) -> None:
        """Cancelled: out of the line, or, when it was admitted in the meantime, out again."""
        with self._lock:
            if waiter.admitted:
                self._used_bytes -= waiter.size_bytes
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            admitted = self._admit()
        for other in admitted:
            other.wake()

    def _admit(self) -> list[_Waiter]:
        """Let in whom there is room for, in order. Under the lock; the caller wakes them."""
        admitted = []
        while self._waiting and self._fits(self._waiting[0].size_bytes):
            waiter = self._waiting.popleft()
            waiter.admitted = True
            self._take(waiter.size_bytes)
            admitted.append(waiter)
        return admitted

    def _fits(self, size_bytes: int) -> bool:
        """Under the lock. While there is nothing to do, no room is kept back."""
        while not (fits := admits(self._used_bytes, size_bytes, self._open_bytes)):
            if not (self._is_idle and self._open()):
                break
        return fits

    def _open(self) -> bool:
        """Twice as far; whether it could be."""
        before_bytes = self._open_bytes
        self._open_bytes = min(self.limit_bytes, 2 * before_bytes)
        return self._open_bytes > before_bytes

    def _take(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)


class Hold:
    """Room in a budget, or in none, until it is released. Any thread may do so; twice is once."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: ByteBudget | None, size_bytes: int) -> None:
        self._budget = budget
        self.size_bytes = size_bytes

    def resize(self, size_bytes: int) -> None:
        """To what it really became. Never waits: those in line wait a little longer instead."""
        size_bytes = max(size_bytes, LEAST_BYTES)
        if self._budget is not None and size_bytes != self.size_bytes:
            difference_bytes = size_bytes - self.size_bytes
            self.size_bytes = size_bytes
            self._budget.change(difference_bytes)

    def release(self) -> None:
        """Give it back."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.change(-self.size_bytes)


@dataclass(eq=False, slots=True)
class _Waiter:
    size_bytes: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    admitted: bool = False

    def wake(self, error: Exception | None = None) -> None:
        """From any thread."""
        tell_loop(self.loop, settle, self.future, None, error)
