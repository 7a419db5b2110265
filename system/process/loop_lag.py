# SPDX-License-Identifier: Apache-2.0
"""Measures how late an event loop is, and logs what blocks it.

    the loop's thread                        the watchdog, a thread of its own
    ─────────────────                        ─────────────────────────────────
    ten times a second: `beat` ──▶ LagWindow ◀── overdue by a second? one warning with the stack
    anybody, any thread: `snapshot` ◀─┘

It samples only while there is work; otherwise it has no timer, and its thread is blocked, so that
an idle process is not woken. A pause begins after `LINGER_SAMPLES` more samples, so that short work
is sampled, and a stall at its end is recorded.

Lag is the delay of a timer. A loop that is blocked for five seconds misses fifty timers, so
fifty samples are filled in (5.0, 4.9, … 0.1): otherwise the longest stall would weigh least. A
stall that still lasts counts with the samples that it has missed so far.
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
from dataclasses import dataclass, field

INTERVAL_SECONDS = 0.1
WINDOW_SECONDS = 60.0
STALL_SECONDS = 1.0  # a longer delay is logged, with the code that causes it
LINGER_SAMPLES = 10  # after the last work
_ROUNDING = 1e-9

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LagSnapshot:
    """The lag over the window, in seconds.

    The window covers sampled time only, so measurements stay while the loop is idle.
    """

    samples: int
    p50_seconds: float
    p99_seconds: float
    max_seconds: float


class LagWindow:
    """The samples of the last `window_seconds`, without a loop or a clock.

    One thread writes; others may read, since a deque is copied in one step.
    """

    def __init__(self, now: float, interval_seconds: float, window_seconds: float) -> None:
        self._interval = interval_seconds
        self._most = max(1, round(window_seconds / interval_seconds))
        self._lags: deque[float] = deque(maxlen=self._most)
        self.due = now + interval_seconds  # of the next sample; infinite while paused

    def beat(self, now: float) -> None:
        """Record that the loop runs at `now`, and when it should run next."""
        self._lags.extend(lags_of(self.due, now, self._interval, self._most))
        lag = max(0.0, now - self.due)
        self.due += (math.floor(lag / self._interval + _ROUNDING) + 1) * self._interval

    def overdue_seconds(self, now: float) -> float:
        """Return the seconds since the loop should have run."""
        return max(0.0, now - self.due)

    def snapshot(self, now: float) -> LagSnapshot:
        """Return the present lag; a stall that still lasts counts."""
        lags = self._lags.copy()
        if overdue := self.overdue_seconds(now):
            lags.extend(lags_of(now - overdue, now, self._interval, self._most))
        ordered = sorted(lags)
        p50, p99, longest = (quantile(ordered, share) for share in (0.5, 0.99, 1.0))
        return LagSnapshot(len(ordered), p50, p99, longest)


def lags_of(due: float, now: float, interval: float, most: int) -> list[float]:
    """Return the lags of the sample that was due and of later missed ones, at most `most`."""
    lag = max(0.0, now - due)
    count = math.floor(lag / interval + _ROUNDING) + 1
    return [max(0.0, lag - n * interval) for n in range(max(0, count - most), count)]


def quantile(ordered: list[float], share: float) -> float:
    """Return a quantile of sorted values by nearest rank; 0 without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(eq=False)
class EventLoopLagMonitor:
    """Measures the loop on which it is started, while there is work.

    A process that is mostly idle starts it paused, and reports when it has work: `resume` and
    `pause` may be called repeatedly, and blocks of `watching` are counted. All methods but
    `snapshot` are called on the loop's thread.
    """

    name: str = "loop"  # of the loop, in log lines and in the watchdog's thread name
    interval_seconds: float = INTERVAL_SECONDS
    window_seconds: float = WINDOW_SECONDS
    stall_seconds: float = STALL_SECONDS
    clock: Callable[[], float] = time.monotonic
    _loop: asyncio.AbstractEventLoop | None = field(init=False, default=None)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)  # set while it samples
    _watching: int = field(init=False, default=0)  # blocks of `watching`
    _samples_left: float = field(init=False, default=math.inf)  # before it pauses
    _thread: threading.Thread | None = field(init=False, default=None)
    # Set while it samples; until then the watchdog waits.
    _samples: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._window = LagWindow(math.inf, self.interval_seconds, self.window_seconds)
        self._ended = threading.Event()

    def start(self, *, paused: bool = False) -> None:
        """Start on the running loop, sampling or paused. A second call does nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ended = threading.Event()
            if not paused or self._watching:
                self.resume()

    def stop(self) -> None:
        """Stop, and return when the watchdog has ended. The measurements can still be read."""
        self._stop_sampling()
        self._loop = None
        if self._thread is not None:
            self._ended.set()
            self._samples.set()
            self._thread.join()
            self._thread = None
            self._samples.clear()

    def resume(self) -> None:
        """Sample from now on; does nothing before `start`, or if it samples already."""
        self._samples_left = math.inf
        if self._loop is None or self._timer is not None:
            return
        self._window.due = self.clock() + self.interval_seconds
        self._timer = self._loop.call_later(self.interval_seconds, self._beat)
        self._samples.set()
        if self._thread is None:
            name, watched = f"{self.name}-watchdog", (threading.get_ident(), self._ended)
            thread = threading.Thread(target=self._watch, args=watched, name=name, daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as exc:  # must not make the work fail
                log.warning("%s is sampled without its watchdog: %s", self.name, exc)

    def pause(self) -> None:
        """Stop sampling after `LINGER_SAMPLES` more; a second call does nothing."""
        self._samples_left = min(self._samples_left, LINGER_SAMPLES)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the block as work: the first block resumes, and the end of the last one pauses."""
        self._watching += 1
        if self._watching == 1:
            self.resume()
        try:
            yield
        finally:
            self._watching -= 1
            if self._watching == 0:
                self.pause()

    def snapshot(self) -> LagSnapshot:
        """Return the lag until now; may be called from any thread."""
        return self._window.snapshot(self.clock())

    def __enter__(self) -> EventLoopLagMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _beat(self) -> None:
        assert self._loop is not None
        now = self.clock()
        self._window.beat(now)
        self._samples_left -= 1
        if self._samples_left <= 0:
            self._stop_sampling()
        else:
            self._timer = self._loop.call_later(self._window.due - now, self._beat)

    def _stop_sampling(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._window.due = math.inf
        self._samples.clear()

    def _watch(self, watched: int, ended: threading.Event) -> None:
        """Log each stall once, on the watchdog's thread, while it lasts."""
        is_logged = False
        while self._samples.wait() and not ended.wait(self.stall_seconds / 2):
            overdue = self._window.overdue_seconds(self.clock())
            if overdue >= self.stall_seconds and not is_logged:
                frame = sys._current_frames().get(watched)  # noqa: SLF001  documented all the same
                lines = traceback.format_stack(frame) if frame else ["a thread that has ended"]
                text = "%s is blocked for %.1f s by:\n%s"
                log.warning(text, self.name, overdue, "".join(lines).rstrip())
            is_logged = overdue >= self.stall_seconds
