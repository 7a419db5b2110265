# SPDX-License-Identifier: Apache-2.0
"""An event loop on a thread of its own, for a main thread in which signals raise exceptions.

And the C library's heap while a rollout runs, in a process that does nothing else meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of `mallopt(3)`
_KEPT_BYTES, _MAPPED_BYTES = 64 << 20, 32 << 20
_USUAL_BYTES = 64 << 10, 128 << 10  # of a worker: `client/daemon.py`, and the library's default

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


@contextlib.contextmanager
def reusing_freed_memory() -> Iterator[None]:
    """Large messages are received into memory that was freed before, up to 64 MB of it.

    A worker gives freed memory back at once. Then each page of an observation of a megabyte, and of
    each copy, costs a fault: 1,500 a step, a third of the CPU of a rollout.
    """
    _set_heap(_KEPT_BYTES, _MAPPED_BYTES)
    try:
        yield
    finally:
        _set_heap(*_USUAL_BYTES)


def _set_heap(kept_bytes: int, mapped_bytes: int) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # a C library that is not GNU's
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, kept_bytes)
        mallopt(_MMAP_THRESHOLD, mapped_bytes)
