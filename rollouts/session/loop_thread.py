# SPDX-License-Identifier: Apache-2.0
"""Event loops on threads of their own: of all sessions of synchronous code, and of a rollout.

The sessions' thread is started with the first session, and ends with the process. A process that
was forked has no such thread: it gets one of its own with its first session. When Python ends, it
stops the thread before it closes the generators that are left: a call from one of these would never
return.

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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from ...system.process.standard_streams import open_closed_streams

_T = TypeVar("_T")


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

        What interrupts the wait cancels the coroutine.

        Raises `RuntimeError`: Python ends.
        """
        if sys.is_finalizing():
            coroutine.close()
            raise RuntimeError("Python ends: no session can be used any more")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_lock = threading.Lock()  # guards `_threads`
_threads: list[LoopThread] = []  # this process's, or its parent's


def loop_thread() -> LoopThread:
    """The thread of this process."""
    with _lock:
        if not _threads or _threads[-1].pid != os.getpid():
            _threads[:] = [LoopThread()]
        return _threads[-1]


def run_on_thread(main: Coroutine[Any, Any, _T]) -> _T:
    """The coroutine's result, from an event loop on a thread of its own.

    A signal that is raised in the main thread meets nothing but a wait there; the coroutine is then
    cancelled, and has ended when this returns.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    loop = runner.get_loop()
    task = loop.create_task(main)

    def run() -> _T:
        with runner:
            return loop.run_until_complete(task)

    with ThreadPoolExecutor(1, "rollout") as thread:
        # A signal in the start of a thread would keep the executor from waiting for the thread.
        thread.submit(int).result()
        try:
            return thread.submit(run).result()
        except BaseException:  # cancelled, too: it is raised here, wherever the thread is
            with contextlib.suppress(RuntimeError):  # the loop has ended by now
                loop.call_soon_threadsafe(task.cancel)
            raise
