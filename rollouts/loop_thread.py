# SPDX-License-Identifier: Apache-2.0
"""An event loop on a thread of its own, for a main thread in which signals raise exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

_T = TypeVar("_T")


def run_on_thread(main: Coroutine[Any, Any, _T]) -> _T:
    """The coroutine's result, from an event loop on a thread of its own.

    A signal that is raised in the main thread meets nothing but a wait there; the coroutine is then
    cancelled, and has ended when this returns.
    """
    done: Future[_T] = Future()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    loop = runner.get_loop()
    task = loop.create_task(main)

    def run() -> None:
        try:
            with runner:
                result = loop.run_until_complete(task)
        except BaseException as exc:
            done.set_exception(exc)
        else:
            done.set_result(result)

    thread = threading.Thread(target=run, name="rollout")
    try:
        thread.start()
        return done.result()
    except BaseException:  # cancelled, too: it is raised here, wherever the other thread is
        with contextlib.suppress(RuntimeError):  # the loop has ended by now
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        with contextlib.suppress(RuntimeError):  # a signal came before it was started
            thread.join()
