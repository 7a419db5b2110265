# SPDX-License-Identifier: Apache-2.0
"""Measures how late an event loop is, and logs what blocks it.

    the loop's thread                      the watchdog, an OS thread of its own
    ─────────────────                      ─────────────────────────────────────
    ten times a second: `beat` ──▶ LagWindow ◀── how long overdue? who holds it? (stack to the log)
                                      │     ──▶ `on_heartbeat(snapshot)`, once a second
    anybody, any thread: `snapshot` ◀─┘

It samples only while there is something to be late for: between `resume` and `pause`, or while
`begin` was called more often than `end` (or within `with monitor.watching()`). Otherwise it has no
timer, and its thread is blocked or was never started: an idle process is not woken. Pausing waits
for `LINGER_SAMPLES` more samples, so that short work is sampled at all, a stall that it ended with
is recorded, and requests that follow each other cost nothing.

Lag is the delay of a timer. A loop that is blocked for five seconds misses fifty timers, so
fifty samples are filled in (5.0, 4.9, … 0.1): otherwise the longest stall would weigh least. A
stall that still lasts counts with what it has missed by now.

`LoopState` tells apart: *alive*; *busy*, it turns, but late all the time; *wedged*, something has
held it for `stall_seconds`; *dead*, it does not run any more. The heartbeat comes from a thread
that needs no loop: when it stays away, the process is dead or stopped, or C code keeps the GIL.

The lock of `LagWindow` is held for a copy of some hundred floats at most.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

INTERVAL_SECONDS = 0.1
WINDOW_SECONDS = 60.0
STALL_SECONDS = 1.0  # from here on it is looked at who holds the loop
HEARTBEAT_SECONDS = 1.0
LINGER_SAMPLES = 10  # after the last work
BUSY_SECONDS = 0.1  # median lag of the last samples of a loop that is called busy
RECENT_SAMPLES = 20  # two seconds
MOST_THREADS_SHOWN = 20
_ROUNDING = 1e-9

log = logging.getLogger(__name__)


class LoopState(StrEnum):
    """The state of a loop, as its watchdog sees it."""

    ALIVE = "alive"
    BUSY = "busy"
    WEDGED = "wedged"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class LagSnapshot:
    """The lag over the window, in seconds; `worst_seconds` and `stalls` since the start.

    The window is of the time that was sampled: what was measured stays while nothing happens.
    """

    state: LoopState
    samples: int
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    max_seconds: float
    worst_seconds: float
    stalls: int  # of `stall_seconds` and more

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


class LagWindow:
    """The arithmetic: samples of the last `window_seconds`. Knows no loop and no clock."""

    def __init__(
        self,
        now: float,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        window_seconds: float = WINDOW_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._interval = interval_seconds
        self._stall = stall_seconds
        self._most = max(1, round(window_seconds / interval_seconds))
        self._lags: deque[float] = deque(maxlen=self._most)
        self._due = now + interval_seconds
        self._worst = 0.0
        self._stalls = 0
        self._lock = threading.Lock()

    def beat(self, now: float) -> float:
        """The loop turns. Returns when it should do so next."""
        with self._lock:
            missed = lags_of(self._due, now, self._interval, self._most)
            self._lags.extend(missed)
            lag = now - self._due
            self._worst = max(self._worst, lag)
            self._stalls += lag >= self._stall
            self._due += (math.floor(max(0.0, lag) / self._interval + _ROUNDING) + 1) * (
                self._interval
            )
            return self._due

    def resume(self, now: float) -> None:
        """Expect the next beat one interval from now."""
        with self._lock:
            self._due = now + self._interval

    def pause(self) -> None:
        """Expect no beat; what was measured stays."""
        with self._lock:
            self._due = math.inf

    def overdue_seconds(self, now: float) -> float:
        """For how long the loop should have turned, and has not."""
        with self._lock:
            return max(0.0, now - self._due)

    def snapshot(self, now: float, *, is_running: bool = True) -> LagSnapshot:
        """What is known now; a stall that still lasts counts."""
        with self._lock:
            lags, due = self._lags.copy(), self._due
            worst, stalls = self._worst, self._stalls
        overdue = max(0.0, now - due)
        if overdue > 0:
            lags.extend(lags_of(due, now, self._interval, self._most))
        ordered = sorted(lags)
        is_paused = due == math.inf
        recent = [] if is_paused else sorted(list(lags)[-RECENT_SAMPLES:])
        return LagSnapshot(
            state=state_of(overdue, quantile(recent, 0.5), self._stall, is_running=is_running),
            samples=len(ordered),
            p50_seconds=quantile(ordered, 0.5),
            p90_seconds=quantile(ordered, 0.9),
            p99_seconds=quantile(ordered, 0.99),
            max_seconds=quantile(ordered, 1.0),
            worst_seconds=max(worst, overdue),
            stalls=stalls + (overdue >= self._stall),
        )


def lags_of(due: float, now: float, interval: float, most: int) -> list[float]:
    """The lag of the sample that was due, and of each that was missed since; the latest `most`."""
    lag = max(0.0, now - due)
    count = math.floor(lag / interval + _ROUNDING) + 1
    return [max(0.0, lag - n * interval) for n in range(max(0, count - most), count)]


def quantile(ordered: list[float], share: float) -> float:
    """By nearest rank, of values in their order; 0 when there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def state_of(
    overdue: float, recent_median: float, stall_seconds: float, *, is_running: bool
) -> LoopState:
    """What to call a loop."""
    if not is_running:
        return LoopState.DEAD
    if overdue >= stall_seconds:
        return LoopState.WEDGED
    return LoopState.BUSY if recent_median >= BUSY_SECONDS else LoopState.ALIVE


class EventLoopLagMonitor:
    """Measures the loop that it is started on, while there is something to be late for.

    `with EventLoopLagMonitor() as lag:` inside a coroutine measures within the block. A process
    that is idle most of the time starts it paused, and says when it has work:

        lag.start(paused=True)
        lag.resume(), lag.pause()          # both may be called again and again
        with lag.watching(): ...           # counted: a request or a session under way

    All methods but `snapshot` are called on the loop's thread.
    """

    def __init__(
        self,
        name: str = "loop",
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        window_seconds: float = WINDOW_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        on_heartbeat: Callable[[LagSnapshot], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare it; nothing runs yet.

        Args:
            name: of the loop, in log lines and of the watchdog's thread.
            interval_seconds: between two samples.
            window_seconds: how much sampled time the percentiles are of.
            stall_seconds: a delay from which on the code that causes it is logged.
            on_heartbeat: called on the watchdog's thread when it resumes, once a second while it
                samples, and once more when it pauses.
            clock: monotonic seconds.
        """
        self.name = name
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._on_heartbeat = on_heartbeat
        self._make_window = partial(
            LagWindow,
            interval_seconds=interval_seconds,
            window_seconds=window_seconds,
            stall_seconds=stall_seconds,
        )
        self._window = self._make_window(clock())
        self._window.pause()
        self._interval_seconds = interval_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None  # None while it does not sample
        self._is_wanted = False
        self._begun = 0  # by `begin`, without its `end`
        self._samples_left = 0  # before it pauses, when it is not wanted
        self._thread: threading.Thread | None = None
        self._samples = threading.Event()  # what the watchdog waits for while there is nothing
        self._ended = threading.Event()
        self._tell_at_seconds = stall_seconds  # doubled each time, so that a long stall is not spam
        self._held_seconds = 0.0

    def start(self, *, paused: bool = False) -> None:
        """Begin on the running loop, at once or with `resume`. A second call does nothing."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._window = self._make_window(self._clock())
        self._window.pause()
        self._ended = threading.Event()
        if not paused or self._begun:
            self.resume()

    def stop(self) -> None:
        """Return when the watchdog has ended. What was measured can still be read."""
        self._stop_sampling()
        self._is_wanted, self._loop = False, None
        if self._thread is not None:
            self._ended.set()
            self._samples.set()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._thread = None
            self._samples.clear()

    def resume(self) -> None:
        """Sample from now on. Before `start` and when it samples already, it does nothing."""
        self._is_wanted = self._loop is not None
        if self._loop is None or self._timer is not None:
            return
        self._window.resume(self._clock())
        self._timer = self._loop.call_later(self._interval_seconds, self._beat)
        self._samples.set()
        if self._thread is None:
            self._start_watchdog()

    def pause(self) -> None:
        """Stop sampling after `LINGER_SAMPLES` more; a second call does nothing."""
        if self._is_wanted:
            self._is_wanted, self._samples_left = False, LINGER_SAMPLES

    def begin(self) -> None:
        """Count a session or request that has begun; the first resumes."""
        self._begun += 1
        if self._begun == 1:
            self.resume()

    def end(self) -> None:
        """Count one that has ended; the last pauses."""
        self._begun -= 1
        if self._begun == 0:
            self.pause()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the block as work under way."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def snapshot(self) -> LagSnapshot:
        """The lag until now; from any thread."""
        loop = self._loop
        is_running = loop is None or loop.is_running()
        return self._window.snapshot(self._clock(), is_running=is_running)

    def __enter__(self) -> EventLoopLagMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _beat(self) -> None:
        now = self._clock()
        due = self._window.beat(now)
        if not self._is_wanted:
            self._samples_left -= 1
            if self._samples_left <= 0:
                self._stop_sampling()
                return
        assert self._loop is not None
        self._timer = self._loop.call_later(due - now, self._beat)

    def _stop_sampling(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._window.pause()
        self._samples.clear()

    def _start_watchdog(self) -> None:
        thread = threading.Thread(
            target=self._watch,
            args=(threading.get_ident(), self._ended),
            name=f"{self.name}-watchdog",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as exc:  # the work itself must not fail of it
            log.warning("%s is sampled without its watchdog: %s", self.name, exc)
            return
        self._thread = thread

    # On the watchdog's thread

    def _watch(self, watched: int, ended: threading.Event) -> None:
        pause = min(HEARTBEAT_SECONDS, self._stall_seconds / 2)
        beat_at = 0.0
        while not ended.is_set():
            if not self._samples.is_set():
                self._beat_heart()  # the last, until there is work again
                self._samples.wait()
                self._beat_heart()
            if ended.wait(pause):
                return
            self._tell_stall(self._window.overdue_seconds(self._clock()), watched)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + HEARTBEAT_SECONDS - pause / 2
                self._beat_heart()

    def _beat_heart(self) -> None:
        if self._on_heartbeat is None:
            return
        try:
            self._on_heartbeat(self.snapshot())
        except Exception:
            log.exception("the heartbeat of %s", self.name)

    def _tell_stall(self, overdue: float, watched: int) -> None:
        if overdue >= self._tell_at_seconds:
            self._tell_at_seconds = 2 * overdue
            log.warning("%s is blocked for %.1f s by:\n%s", self.name, overdue, held_by(watched))
        elif overdue < self._held_seconds and self._tell_at_seconds > self._stall_seconds:
            log.warning("%s runs again after more than %.1f s", self.name, self._held_seconds)
            self._tell_at_seconds = self._stall_seconds
        self._held_seconds = overdue


def held_by(watched: int) -> str:
    """The stack of the thread `watched`; of the others, which may keep the GIL, the last line."""
    frames = sys._current_frames()  # noqa: SLF001  # documented, in spite of its name
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = frames.pop(watched, None)
    lines = [f"thread {names.get(watched, watched)}:\n"]
    lines += traceback.format_stack(stack) if stack is not None else ["  has ended\n"]
    for ident, frame in list(frames.items())[:MOST_THREADS_SHOWN]:
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}:\n")
            lines += traceback.format_stack(frame, limit=1)
    return "".join(lines).rstrip()
