# SPDX-License-Identifier: Apache-2.0
"""Runs synchronous calls: on a thread of the session's own, or quick ones on a shared one.

SQLite connections, Playwright and greenlets are bound to the thread that made them, so the
factory, every call and `close` of one environment share a thread (`SessionThread`):

    event loop ──(settle, call)──▶ SimpleQueue ──▶ the thread
        ▲                                              │
        └────────── call_soon_threadsafe ◀─────────────┘

Threads are daemons: a call that never returns must not keep the process from exiting. They are
started without `threading.Thread`: 14 kB and 120 us each instead of 17 kB and 190 us. Therefore
they have no names; a hung call is logged with its session.

A call on its session's own thread costs as much as the rest of a small step
(`docs/decisions/0026-shared-thread.md`). If an environment's calls may run on any thread, all calls
that arrive in one iteration of the event loop are handed over together, and answered together:

    submit ──▶ jobs of this iteration ──(once)──▶ SharedThread: call, call, call, …
    settled ◀──(once, or each millisecond)── outcomes ◀───────────┘
       │ while a call of the session is not over, the next one waits in its runner
       ▼
    a call lasts for `STALL_SECONDS`     the outcomes before it are settled, and the jobs behind it
                                         move to another SharedThread
    no thread can be started             the call fails with that error
    calls wait (disk, network, sleep)    they cost credit, which quick calls earn; without credit,
                                         each session uses a thread of its own, for a while

So a call that blocks delays others by less than twice `STALL_SECONDS`, and not repeatedly.
`CallSharing` decides, on the event loop; no lock: `deque` gives each job to one thread alone.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ...system.process import forking
from ...system.text.units import MB

STACK_BYTES = MB  # of virtual memory; below the size of a huge page
STALL_SECONDS = 0.05
FLUSH_SECONDS = 0.001  # outcomes wait no longer for those of later calls
MAX_DEBT_SECONDS = 0.15  # three stalls
EARNED_SECONDS = 50e-6  # by a quick call: rather more than sharing saves
APART_SECONDS = 60.0  # doubled each time

Settle = Callable[[Any, BaseException | None], None]
_Call = tuple[Settle, Callable[..., Any], tuple[Any, ...]]
Job = tuple["SharingRunner", Settle, Callable[..., Any], tuple[Any, ...]]
Outcome = tuple["SharingRunner", Settle, Any, Exception | None]

log = logging.getLogger("openenvd.env_host")


class SessionThread:
    """Runs the calls of one session, or of all, one after the other. From the event loop only."""

    __slots__ = ("_jobs", "_loop", "ident")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ident = 0  # of the thread of the last call
        self._jobs: SimpleQueue[_Call | None] | None = None  # None: the thread has not started

    def submit(self, settle: Settle, call: Callable[..., Any], *args: Any) -> None:
        """Run `call(*args)`, then call `settle(result, error)` on the loop."""
        if self._jobs is None:
            jobs: SimpleQueue[_Call | None] = SimpleQueue()
            start_thread(functools.partial(self._work, jobs))
            self._jobs = jobs
        self._jobs.put((settle, call, args))

    def run(
        self, call: Callable[..., Any], *args: Any, on_return: Callable[[], None] = lambda: None
    ) -> asyncio.Future[Any]:
        """Submit `call(*args)`. If its future is cancelled before the call starts, it is skipped.

        `on_return` is called on the loop when the thread has returned from the call or skipped it.
        """
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            on_return()
            if future.done():  # its waiter was cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.submit(settle, lambda: None if future.cancelled() else call(*args))
        return future

    def stop(self) -> None:
        """End the thread after the calls it was given; does not wait."""
        if self._jobs is not None:
            self._jobs.put(None)

    def _work(self, jobs: SimpleQueue[_Call | None]) -> None:
        while (job := jobs.get()) is not None:
            settle, call, args = job
            self.ident = threading.get_ident()
            tell_loop(self._loop, settle, *outcome_of(call, args))


class SharedThread:
    """One thread, and the jobs that wait for it. On the event loop, but for `_work`."""

    def __init__(self, tell: Callable[[SharedThread, float], None]) -> None:
        """Start it; `tell` is called on the loop when there are outcomes.

        It is given the thread, and for how many seconds its calls have waited.
        """
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()
        self._outcomes: deque[Outcome] = deque()  # that the loop has not taken yet
        self._wake: SimpleQueue[bool] = SimpleQueue()  # False: end
        self._is_handing_over = False
        self._is_alone = False  # the last iteration that brought jobs brought only one
        self._added = 0
        self.finished = 0  # calls; counted by the thread
        start_thread(self._work)

    @property
    def is_idle(self) -> bool:
        """Return whether it has done all that it was given."""
        return self.finished == self._added

    def add(self, job: Job) -> None:
        """Run a job after those that are there."""
        was_idle = self.is_idle
        self._added += 1
        self._jobs.append(job)
        if self._is_handing_over:
            self._is_alone = False
        elif self._is_alone and was_idle:
            self._wake.put(True)
        else:
            self._is_handing_over = self._is_alone = True
            self._loop.call_soon(self._hand_over)  # with those that this iteration still reads

    def abandon(self) -> list[Job]:
        """End the thread after its current call, and return the jobs that wait for it."""
        waiting: list[Job] = []
        with contextlib.suppress(IndexError):  # the thread may take the last one
            while self._jobs:
                waiting.append(self._jobs.popleft())
        self._wake.put(False)
        return waiting

    def take_outcomes(self) -> list[Outcome]:
        """Return what has not been taken yet."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _hand_over(self) -> None:
        self._is_handing_over = False
        self._wake.put(True)

    def _work(self) -> None:
        while self._wake.get():
            self._run_all()

    def _run_all(self) -> None:
        """Run the waiting jobs, and deliver their outcomes in batches within a time limit."""
        began, cpu_began, ident = time.perf_counter(), time.process_time(), threading.get_ident()
        while self._jobs:
            try:
                runner, settle, call, args = self._jobs.popleft()
            except IndexError:  # abandoned meanwhile
                break
            runner.ident = ident
            self._outcomes.append((runner, settle, *outcome_of(call, args)))
            self.finished += 1
            seconds = time.perf_counter() - began
            if seconds >= FLUSH_SECONDS:
                cpu_seconds = time.process_time() - cpu_began
                waited = waited_seconds(seconds, cpu_seconds)
                tell_loop(self._loop, self._tell, self, waited)
                began, cpu_began = time.perf_counter(), time.process_time()
        if self._outcomes:
            tell_loop(self._loop, self._tell, self, 0.0)


class CallSharing:
    """The shared thread of a process, and whether it is used now. On the event loop only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread: SharedThread | None = None
        self._look: asyncio.TimerHandle | None = None  # while the thread has something to do
        self._debt_seconds = 0.0
        self._apart_until = 0.0
        self._apart_seconds = APART_SECONDS

    def submit(self, job: Job) -> bool:
        """Run a job on the shared thread; False when it has to run elsewhere."""
        thread = self._thread
        if thread is None:
            if self._loop.time() < self._apart_until:
                return False
            thread = self._thread = SharedThread(self._settled)
        thread.add(job)
        if self._look is None:
            self._look_later(thread)
        return True

    def _look_later(self, thread: SharedThread) -> None:
        look, finished = self._look_at, thread.finished
        self._look = self._loop.call_later(STALL_SECONDS, look, thread, finished)

    def _look_at(self, thread: SharedThread, finished: int) -> None:
        """Move on when the thread has been in the same call since the last look."""
        self._look = None
        if thread is not self._thread or thread.is_idle:
            return
        if thread.finished != finished:
            self._look_later(thread)
            return
        log.info("a call has lasted for %g s; those behind it move on", STALL_SECONDS)
        self._pay(STALL_SECONDS)
        self._move_on(thread)

    def _settled(self, thread: SharedThread, waited: float) -> None:
        count = self._settle_outcomes(thread)
        if thread is self._thread:
            self._pay(waited - EARNED_SECONDS * count)

    def _settle_outcomes(self, thread: SharedThread) -> int:
        outcomes = thread.take_outcomes()
        for runner, settle, result, error in outcomes:
            try:
                runner.settled(settle, result, error)
            except Exception:
                log.exception("the outcome of a call was lost")
        return len(outcomes)

    def _pay(self, seconds: float) -> None:
        """Account for what sharing the thread costs; stop sharing when the cost is too high."""
        self._debt_seconds = max(0.0, self._debt_seconds + seconds)
        if self._debt_seconds <= MAX_DEBT_SECONDS or self._thread is None:
            return
        text = "calls of sessions block: for %g s, each session has its own thread"
        log.info(text, self._apart_seconds)
        self._debt_seconds = 0.0
        self._apart_until = self._loop.time() + self._apart_seconds
        self._apart_seconds *= 2
        self._move_on(self._thread)

    def _move_on(self, thread: SharedThread) -> None:
        """Leave a thread to the call that it runs; a no-op for one that was left already."""
        if thread is self._thread:
            self._thread = None
            waiting = thread.abandon()
            self._settle_outcomes(thread)
            for job in waiting:
                job[0].start(job)


class SharingRunner(SessionThread):
    """Runs the calls of one session, one at a time: on the shared thread, or on its own."""

    __slots__ = ("_held", "_is_busy", "_sharing")

    def __init__(self, sharing: CallSharing) -> None:
        super().__init__()
        self._sharing = sharing
        self._is_busy = False
        self._held: deque[Job] | None = None  # calls that came while another was not over

    def submit(self, settle: Settle, call: Callable[..., Any], *args: Any) -> None:
        """Run `call(*args)`, then call `settle(result, error)` on the loop."""
        job = (self, settle, call, args)
        if self._is_busy:
            self._held = self._held or deque()
            self._held.append(job)
        else:
            self.start(job)

    def start(self, job: Job) -> None:
        """Run a job now; no other of this session is under way."""
        self._is_busy = True
        _, settle, call, args = job
        try:
            if not self._sharing.submit(job):
                super().submit(functools.partial(self.settled, settle), call, *args)
        except Exception as exc:  # no thread can be started
            self._loop.call_soon(self.settled, settle, None, exc)

    def settled(self, settle: Settle, result: Any, error: BaseException | None) -> None:
        """Hand over an outcome, after the next call has begun, if there is one."""
        self._is_busy = False
        if self._held:
            self.start(self._held.popleft())
        settle(result, error)


def waited_seconds(seconds: float, process_cpu_seconds: float) -> float:
    """Return how long calls kept other calls waiting without computing.

    0 if the process was computing: in calls, which would take as long on other threads, or on its
    event loop, while calls waited for the GIL.
    """
    return 0.0 if process_cpu_seconds >= seconds / 2 else seconds


def plain_error(exc: BaseException) -> Exception:
    """Return what an environment has raised as an error that ends its call only.

    `sys.exit()` must not end the process, and a future cannot carry a `StopIteration`.
    """
    if isinstance(exc, Exception) and not isinstance(exc, StopIteration):
        return exc
    error = RuntimeError(f"the environment raised {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


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


def tell_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """Call a function on a loop, from any thread; nothing is done when the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # closed; `suppress` would double what this costs
        return
