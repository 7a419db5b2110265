# SPDX-License-Identifier: Apache-2.0
"""`SessionThread`: the one thread on which a session's synchronous calls run, in order.

SQLite connections, Playwright and greenlets are bound to the thread that made them, so the
factory, every call and `close` of one environment share it.

    event loop ──(future, call)──▶ SimpleQueue ──▶ thread
        ▲                                            │
        └────────── call_soon_threadsafe ◀───────────┘

The thread starts with its first call. It is a daemon thread: a call that never returns must not
keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_Job = tuple["asyncio.Future[Any]", Callable[[], Any]]


class SessionThread:
    """Runs calls one after the other on a thread of its own. Used from the event loop only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._started = False

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """A future of `call(*args, **kwargs)`; cancelling it before its turn skips the call."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        future = self._loop.create_future()
        self._jobs.put((future, functools.partial(call, *args, **kwargs)))
        return future

    def stop(self) -> None:
        """End the thread after what it has been given; does not wait."""
        if self._started:
            self._jobs.put(None)

    def _work(self) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            while (job := self._jobs.get()) is not None:
                self._do(*job)

    def _do(self, future: asyncio.Future[Any], call: Callable[[], Any]) -> None:
        if future.cancelled():
            return
        result, error = None, None
        try:
            result = call()
        except Exception as exc:
            error = exc
        except BaseException as exc:  # an environment that calls sys.exit() ends its call only
            error = RuntimeError(f"the environment raised {type(exc).__name__}: {exc}")
            error.__cause__ = exc
        if isinstance(error, StopIteration):  # a future cannot carry it
            error = RuntimeError(f"the environment raised StopIteration: {error}")
        self._loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
