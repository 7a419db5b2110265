# SPDX-License-Identifier: Apache-2.0
"""Event loops on threads of their own: one for all sessions of synchronous code, one per rollout.

The sessions' thread starts with the first session, and ends with the process. A forked process gets
a thread of its own with its first session. When Python ends, it stops the thread before it closes
the remaining generators, whose calls would otherwise never return.

A rollout, a test or a probe runs on a loop of its own (`run_on_thread`), since signals raise
exceptions in its main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from ...system.process.standard_streams import open_closed_streams

_T = TypeVar("_T")

SIGNAL_POLL_SECONDS = 1.0


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        open_closed_streams()
        self.pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="openenvd sessions", daemon=True
        )
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and return its result.

        An exception that interrupts the wait cancels the coroutine.

        Raises `RuntimeError`: Python is ending.
        """
        if sys.is_finalizing():
            coroutine.close()
            raise RuntimeError("Python ends: no session can be used any more")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return _wait_for(future)
        except BaseException:
            future.cancel()
            raise


_lock = threading.Lock()  # guards `_threads`
_threads: list[LoopThread] = []  # this process's, or its parent's


def loop_thread() -> LoopThread:
    """Return the thread of this process."""
    with _lock:
        if not _threads or _threads[-1].pid != os.getpid():
            _threads[:] = [LoopThread()]
        return _threads[-1]


def _wait_for(future: Future[_T]) -> _T:
    """Wait for a future's result, in a thread that handles signals, and return it.

    A signal that arrives just before a thread blocks does not end the wait, and Python handles it
    only when the wait ends. The wait therefore ends every second.
    """
    while True:
        try:
            return future.result(SIGNAL_POLL_SECONDS)
        except TimeoutError:
            if future.done():  # the coroutine raised it, or has ended since
                return future.result()


def run_on_thread(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in an event loop on a new thread, and return its result.

    The main thread only waits, so a signal's exception interrupts nothing else; the coroutine is
    then cancelled, and has ended when this returns.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    loop = runner.get_loop()
    task = loop.create_task(main)

    def run() -> _T:
        with runner:
            return loop.run_until_complete(task)

    with ThreadPoolExecutor(1, "rollout") as thread:
        # A signal during the start of a thread would prevent the executor's wait for it.
        thread.submit(int).result()
        try:
            return _wait_for(thread.submit(run))
        except BaseException:  # a cancellation, too, which is raised here
            with contextlib.suppress(RuntimeError):  # the loop has ended by now
                loop.call_soon_threadsafe(task.cancel)
            raise
