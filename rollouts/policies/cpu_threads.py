# SPDX-License-Identifier: Apache-2.0
"""Two threads, shared by all episodes, for work that would block the event loop.

    run ─▶ wait for one of two places ─▶ a daemon thread ─▶ the function's result
            (the call's clock stands)      └─ cancelled: the thread is left to itself

More threads would compete with the loop for the GIL. A function that hangs cannot be stopped: its
place is free again, and Python exits without it. When `MAX_HUNG` of them hang at once, nothing more
is begun.

A policy is not to blame for how many others are asked beside it: `at_most` limits one call of a
policy without its wait for a thread.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter

from ..episodes import FailureReason
from ..errors import EpisodeFailed, PolicyHangs

CPU_THREADS = 2  # 512 of them held the loop for 1.5 s where one job held it for 12 ms
MAX_HUNG = 16

_T = TypeVar("_T")
_Queue = SimpleQueue[Callable[[], None] | None]
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
        self._threads = _DaemonThreads()
        weakref.finalize(self, self._threads.end).atexit = False
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
                return await self._threads.call(call)
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
        except (SystemExit, KeyboardInterrupt, StopIteration) as exc:  # they would end the loop
            raise RuntimeError(f"{type(exc).__name__} was raised") from exc
        finally:
            self.is_running = False


class _DaemonThreads:
    """As many threads as functions are called at once. Python does not wait for them at its exit.

    It would for anyio's and an executor's: with one that hangs, it never exits. Threads are used
    again, since a policy's libraries may keep things for each thread.
    """

    def __init__(self) -> None:
        self._queue: _Queue = SimpleQueue()
        self._idle = 0

    def end(self) -> None:
        """Each thread ends when it is idle."""
        self._queue.put(None)

    async def call(self, function: Callable[[], _T]) -> _T:
        """The result of a function. When this is cancelled, a function that runs is abandoned."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        context = copy_context()

        def work() -> None:
            if future.cancelled():
                return tell(future.cancel)
            try:
                result = context.run(function)
            except BaseException as exc:
                tell(partial(future.set_exception, exc))
            else:
                tell(partial(future.set_result, result))

        def tell(answer: Callable[[], Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._answered, future, answer)

        if self._idle:
            self._idle -= 1
        else:
            Thread(target=_work_off, args=[self._queue], name="policy", daemon=True).start()
        self._queue.put(work)
        return await future

    def _answered(self, future: asyncio.Future[Any], answer: Callable[[], Any]) -> None:
        self._idle += 1
        if not future.done():
            answer()


def _work_off(queue: _Queue) -> None:
    while work := queue.get():
        work()
        del work  # it has a result, which may be large
    queue.put(None)  # for the other threads


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
