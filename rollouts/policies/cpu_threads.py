# SPDX-License-Identifier: Apache-2.0
"""Two threads, shared by all episodes, for work that would block the event loop.

    run ─▶ wait for one of two places ─▶ anyio's thread ─▶ the function's result
            (the call's clock stands)      └─ cancelled: the thread is left to itself

More threads would compete with the loop for the GIL. A function that hangs cannot be stopped: its
place is free again, and its thread ends when the function returns after all. When `MAX_HUNG` of
them hang at once, nothing more is begun.

A policy is not to blame for how many others are asked beside it: `at_most` limits one call of a
policy without its wait for a thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter, to_thread

from ..episodes import FailureReason
from ..errors import EpisodeFailed, PolicyHangs

CPU_THREADS = 2  # 512 of them held the loop for 1.5 s where one job held it for 12 ms
MAX_HUNG = 16

_T = TypeVar("_T")
_clock: ContextVar[asyncio.Timeout | None] = ContextVar("call_clock", default=None)


class CpuThreads:
    """At most `most` functions at once, of all episodes together, beside those that hang."""

    def __init__(
        self,
        most: int = CPU_THREADS,
        *,
        max_hung: int = MAX_HUNG,
        on_hung: Callable[[], None] = lambda: None,
    ) -> None:
        self._places = CapacityLimiter(most)
        self._unlimited = CapacityLimiter(math.inf)  # who has a place needs no other
        self._max_hung = max_hung
        self._on_hung = on_hung
        self._abandoned: set[_Call[Any]] = set()

    async def run(self, function: Callable[[], _T]) -> _T:
        """Call a function off the loop, and return its result.

        Raises:
            PolicyHangs: Too many functions hang.
        """
        self._abandoned = {call for call in self._abandoned if call.is_running}
        if (hung := len(self._abandoned)) >= self._max_hung:
            raise PolicyHangs(f"{hung} abandoned calls of the policy still hang")
        clock = _clock.get()
        go_on = None if clock is None else pause(clock)
        async with self._places:
            if go_on is not None:
                go_on()
            call = _Call(function)
            try:
                return await to_thread.run_sync(
                    call, abandon_on_cancel=True, limiter=self._unlimited
                )
            except asyncio.CancelledError:
                if call.is_running:
                    self._abandoned.add(call)
                    self._on_hung()
                raise


class _Call(Generic[_T]):
    """A function, and whether a thread is in it."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self.is_running = False

    def __call__(self) -> _T:
        self.is_running = True
        try:
            return self._function()
        except (SystemExit, KeyboardInterrupt) as exc:  # they would end the loop
            raise RuntimeError(f"{type(exc).__name__} was raised") from exc
        finally:
            self.is_running = False


@asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[None]:
    """Limit one call of a policy, which is what is awaited inside.

    Raises:
        EpisodeFailed: It took longer.
    """
    timeout = asyncio.timeout(seconds)
    token = _clock.set(timeout)
    try:
        async with timeout:
            yield
    except TimeoutError as exc:
        if not timeout.expired():
            raise
        told = f"the policy took more than {seconds:g} s"
        raise EpisodeFailed(FailureReason.POLICY_TIMED_OUT, told) from exc
    finally:
        _clock.reset(token)


def pause(timeout: asyncio.Timeout) -> Callable[[], None] | None:
    """Let a time-out stand still until what is returned is called. None: it has no limit."""
    when = timeout.when()
    if when is None:
        return None
    now = asyncio.get_running_loop().time
    left = when - now()
    timeout.reschedule(None)
    return lambda: timeout.reschedule(now() + left)
