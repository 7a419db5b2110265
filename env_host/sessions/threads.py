# SPDX-License-Identifier: Apache-2.0
"""Where synchronous calls run: on one thread of the session's own, or on a pool that many share.

SQLite connections, Playwright and greenlets are bound to the thread that made them, so the
factory, every call and `close` of one environment share a thread, unless they may run on any: then
`shared_thread.py` runs quick ones, and the class may say `THREAD_SAFE = True`, so that `ThreadPool`
bounds how many threads there are for others.

    event loop ──(settle, call)──▶ SimpleQueue ──▶ the thread, or a free one of the pool
        ▲                                            │
        └────────── call_soon_threadsafe ◀───────────┘

A thread starts with its first call. Threads are daemons: a call that never returns must not keep
the process from exiting. They are started without `threading.Thread`: 14 kB and 120 us each instead
of 17 kB and 190 us. They have no names therefore; a hung call is logged with its session. The stack
is virtual memory until it is used; a large one invites huge pages.
"""

from __future__ import annotations

import _thread
import asyncio
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ...system import forking, futures
from ...system.units import MB

STACK_BYTES = MB  # below the size of a huge page
POOL_THREADS = 64

Settle = Callable[[Any, BaseException | None], None]
_Job = tuple[Settle, Callable[..., Any], tuple[Any, ...]]


class Runner:
    """Runs calls on threads. Used from the event loop only."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def submit(self, settle: Settle, call: Callable[..., Any], *args: Any) -> None:
        """Have `settle(result, error)` called on the loop when a thread has done `call(*args)`."""
        raise NotImplementedError

    def run(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Submit `call(*args)`; cancelling its future before its turn skips the call."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def unless_cancelled() -> Any:
            return None if future.cancelled() else call(*args)

        self.submit(functools.partial(futures.settle, future), unless_cancelled)
        return future

    def stop(self) -> None:
        """End the session's own thread, if this is one."""


class SessionThread(Runner):
    """Runs calls one after the other on a thread of its own."""

    __slots__ = ("_jobs", "_started")

    def __init__(self) -> None:
        super().__init__()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False

    def submit(self, settle: Settle, call: Callable[..., Any], *args: Any) -> None:
        """Have `settle(result, error)` called on the loop when `call(*args)` is done."""
        if not self._started:
            start_thread(self._work)
            self._started = True
        self._jobs.put((settle, call, args))

    def stop(self) -> None:
        """End the thread after the calls it was given; does not wait."""
        if self._started:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(self._loop, *job)


class ThreadPool(Runner):
    """Runs calls of thread-safe environments, on at most `POOL_THREADS` threads."""

    def __init__(self, threads: int = POOL_THREADS) -> None:
        super().__init__()
        self._most = threads
        self._threads = 0
        self._under_way = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()

    def submit(self, settle: Settle, call: Callable[..., Any], *args: Any) -> None:
        """Have `settle(result, error)` called when a free thread has done `call(*args)`."""
        self._under_way += 1
        if self._threads < min(self._under_way, self._most):
            self._threads += 1
            start_thread(self._work)
        self._jobs.put((functools.partial(self._settle, settle), call, args))

    def _settle(self, settle: Settle, result: Any, error: BaseException | None) -> None:
        self._under_way -= 1
        settle(result, error)

    def _work(self) -> None:
        while True:
            _do(self._loop, *self._jobs.get())


def plain_error(exc: BaseException) -> Exception:
    """Return what an environment has raised as an error that ends its call only.

    `sys.exit()` must not end the process, and a future cannot carry a `StopIteration`.
    """
    if isinstance(exc, Exception) and not isinstance(exc, StopIteration):
        return exc
    error = RuntimeError(f"the environment raised {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


def _do(
    loop: asyncio.AbstractEventLoop,
    settle: Settle,
    call: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    futures.tell_loop(loop, settle, *outcome_of(call, args))


def outcome_of(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Make a call and return its result, or its error; a process that it has forked ends here."""
    forks = forking.forks
    try:
        result = call(*args)
    except BaseException as exc:
        forking.end_copy(forks, exc)
        return None, plain_error(exc)
    forking.end_copy(forks, None)
    return result, None


def start_thread(work: Callable[[], None]) -> None:
    """Start a thread without `threading.Thread`."""
    before = threading.stack_size()
    threading.stack_size(before or STACK_BYTES)  # unless the environment has set one
    try:
        _thread.start_new_thread(work, ())
    finally:
        threading.stack_size(before)  # the setting is the whole process's
