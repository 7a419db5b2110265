# SPDX-License-Identifier: Apache-2.0
"""Two threads, shared by all episodes, for work that would block the event loop.

    event loop                               threads "policy-0", "policy-1"
    run ──job──▶ line ─────────────────────▶ begin ─▶ function ─▶ end
     ▲                                                             │
     └───────────────── answer (call_soon_threadsafe) ◀────────────┘
    cancelled ─▶ give up: in line, the job is passed over;
                          under way, a fresh thread takes the place of its own

More threads would compete with the loop for the GIL. A function that hangs cannot be
stopped: its thread is abandoned, and exits when the function returns after all.
When `MAX_HUNG` of them hang at once, nothing more is begun.

The lock guards the counts and the states of jobs; it is never held while a function runs.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar, cast

from ...system.futures import settle, tell_loop
from ..errors import PolicyHangs
from . import call_clock

CPU_THREADS = 2  # 512 of them held the loop for 1.5 s where one job held it for 12 ms
MAX_HUNG = 16
_NO_FUTURE_HOLDS = (StopIteration, SystemExit, KeyboardInterrupt)  # or they would end the loop

_T = TypeVar("_T")


class _State(Enum):
    IN_LINE = auto()
    UNDER_WAY = auto()
    ENDED = auto()
    GIVEN_UP = auto()


@dataclass(eq=False, slots=True)
class _Job:
    """A function whose result a coroutine awaits."""

    function: Callable[[], Any]
    answer: asyncio.Future[Any]
    go_on: Callable[[], None] | None  # lets the clock of the call run again
    state: _State = _State.IN_LINE
    thread: threading.Thread | None = None

    def begun(self) -> None:
        """On the loop."""
        if self.go_on is not None and not self.answer.done():
            self.go_on()


class CpuThreads:
    """At most `most` jobs at once, of all episodes together, beside those that hang."""

    def __init__(
        self,
        most: int = CPU_THREADS,
        *,
        max_hung: int = MAX_HUNG,
        on_hung: Callable[[], None] = lambda: None,
    ) -> None:
        self._most = most
        self._max_hung = max_hung
        self._on_hung = on_hung
        self._line: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()  # that serve the line
        self._hung = 0
        self._is_closed = False

    async def run(self, function: Callable[[], _T]) -> _T:
        """The function's result, worked out off the loop."""
        if self._hung >= self._max_hung:
            raise PolicyHangs(f"{self._hung} abandoned calls of the policy still hang")
        if self._is_closed:
            raise RuntimeError("the threads of policies are closed")
        job = _Job(function, asyncio.get_running_loop().create_future(), call_clock.stop())
        self._line.put(job)
        self._start_missing_threads()
        try:
            return cast(_T, await job.answer)
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def close(self) -> None:
        """Begins nothing more and joins idle threads; hung ones are left behind."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        for _ in threads:
            self._line.put(None)
        for thread in threads:
            thread.join()

    def _start_missing_threads(self) -> None:
        """Starts threads up to the limit."""
        with self._lock:
            while len(self._threads) < self._most and not self._is_closed:
                name = f"policy-{next(self._numbers)}"
                # A thread that hangs must not keep the interpreter from its end.
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.add(thread)
                thread.start()

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            hangs = job.state is _State.UNDER_WAY
            if job.state is not _State.ENDED:
                job.state = _State.GIVEN_UP
            if hangs and job.thread is not None:
                self._threads.discard(job.thread)
                self._hung += 1
        if hangs:
            self._on_hung()
            self._start_missing_threads()

    # A thread.

    def _serve(self) -> None:
        while (job := self._line.get()) is not None:
            if self._begin(job) and not self._end(job, *_outcome(job.function)):
                return  # another thread has taken our place
            del job  # and with it what it holds, while we wait for the next

    def _begin(self, job: _Job) -> bool:
        """Whether its result is still awaited."""
        with self._lock:
            if job.state is _State.GIVEN_UP:
                return False
            job.state, job.thread = _State.UNDER_WAY, threading.current_thread()
        if job.go_on is not None:
            tell_loop(job.answer.get_loop(), job.begun)
        return True

    def _end(self, job: _Job, result: Any, error: BaseException | None) -> bool:
        """Whether its result was still awaited."""
        with self._lock:
            if job.state is _State.GIVEN_UP:
                self._hung -= 1
                return False
            job.state = _State.ENDED
        tell_loop(job.answer.get_loop(), settle, job.answer, result, error)
        return True


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except _NO_FUTURE_HOLDS as exc:
        error = RuntimeError(f"{type(exc).__name__} was raised")
        error.__cause__ = exc
        return None, error
    except BaseException as exc:
        return None, exc
