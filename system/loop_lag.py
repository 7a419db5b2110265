# SPDX-License-Identifier: Apache-2.0
"""Measures how late an event loop is, and logs what blocks it.

    the loop's thread                      the watchdog, an OS thread of its own
    ─────────────────                      ─────────────────────────────────────
    ten times a second: `beat` ──▶ LagWindow ◀── how long overdue? who holds it? (stack to the log)
                                      │     ──▶ `on_heartbeat(snapshot)`, once a second
    anybody, any thread: `snapshot` ◀─┘

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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

INTERVAL_SECONDS = 0.1
WINDOW_SECONDS = 60.0
STALL_SECONDS = 1.0  # from here on it is looked at who holds the loop
HEARTBEAT_SECONDS = 1.0
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
    """The lag over the window, in seconds; `worst_seconds` and `stalls` since the start."""

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
        recent = sorted(list(lags)[-RECENT_SAMPLES:])
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
    """Measures the loop that it is started on, until it is stopped.

    `with EventLoopLagMonitor() as lag:` inside a coroutine does both.
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
        """`on_heartbeat` is called on the watchdog's thread, once a second."""
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
        self._interval_seconds = interval_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._tell_at_seconds = stall_seconds  # doubled each time, so that a long stall is not spam
        self._held_seconds = 0.0

    def start(self) -> None:
        """Begin, on the running loop. A second call does nothing."""
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._window = self._make_window(self._clock())
        self._timer = self._loop.call_later(self._interval_seconds, self._beat)
        self._ended = threading.Event()
        thread = threading.Thread(
            target=self._watch,
            args=(threading.get_ident(), self._ended),
            name=f"{self.name}-watchdog",
            daemon=True,
        )
        thread.start()
        self._thread = thread  # not when there is no room for it: then nothing is to be stopped

    def stop(self) -> None:
        """Return when the watchdog has ended. What was measured can still be read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._ended.set()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._thread = None

    def snapshot(self) -> LagSnapshot:
        """The lag until now; from any thread."""
        loop = self._loop
        is_running = loop is None or loop.is_running()
        now = self._clock() if self._timer is not None else -math.inf  # stopped: nothing is due
        return self._window.snapshot(now, is_running=is_running)

    def __enter__(self) -> EventLoopLagMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _beat(self) -> None:
        now = self._clock()
        assert self._loop is not None
        self._timer = self._loop.call_later(self._window.beat(now) - now, self._beat)

    # On the watchdog's thread

    def _watch(self, watched: int, ended: threading.Event) -> None:
        pause = min(HEARTBEAT_SECONDS, self._stall_seconds / 2)
        beat_at = 0.0
        while not ended.wait(pause):
            self._tell_stall(self._window.overdue_seconds(self._clock()), watched)
            if self._on_heartbeat is None or time.monotonic() < beat_at:
                continue
            beat_at = time.monotonic() + HEARTBEAT_SECONDS - pause / 2
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
