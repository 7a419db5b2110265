# SPDX-License-Identifier: Apache-2.0
"""The lag of an event loop: the arithmetic with a told time, the stack with a loop that is held."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue

import pytest

from openenvd.system.process import loop_lag


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Paused = tuple[loop_lag.EventLoopLagMonitor, Clock]


@pytest.fixture
async def paused() -> AsyncIterator[Paused]:
    """A monitor that has nothing to do, with its clock."""
    clock = Clock()
    monitor = loop_lag.EventLoopLagMonitor(clock=clock, interval_seconds=0.001)
    monitor.start(paused=True)
    yield monitor, clock
    monitor.stop()


@pytest.mark.parametrize(
    ("due", "now", "most", "samples", "first"),
    [(10.0, 15.0, 600, 51, 5.0), (0.0, 100.0, 10, 10, 0.9)],
    ids=["the one that was due and fifty more", "no more than the window has"],
)
def test_a_stall_is_all_the_samples_that_were_missed(
    due: float, now: float, most: int, samples: int, first: float
) -> None:
    expected = [pytest.approx(first - number * 0.1, abs=1e-6) for number in range(samples)]
    assert loop_lag.lags_of(due, now, 0.1, most=most) == expected


@pytest.mark.parametrize(
    ("beats", "dues"),
    [
        ([0.1, 0.2, 0.3], [0.2, 0.3, 0.4]),
        ([0.25, 0.3], [0.3, 0.4]),
        ([0.0995], [0.2]),
    ],
    ids=["in time", "it keeps its rhythm after a stall", "a timer that comes too early"],
)
def test_when_the_next_beat_is_due(beats: list[float], dues: list[float]) -> None:
    window = loop_lag.LagWindow(0.0, 0.1, 60.0)
    for beat, due in zip(beats, dues, strict=True):
        window.beat(beat)
        assert window.due == pytest.approx(due)
    lag = max(beat - 0.1 for beat in beats[:1])
    assert window.snapshot(beats[-1]).max_seconds == pytest.approx(max(lag, 0.0))


def test_one_long_stall_moves_the_percentiles_as_long_as_it_lasted() -> None:
    window = loop_lag.LagWindow(0.0, 0.1, 10.0)
    for _ in range(49):
        window.beat(window.due)
    now = window.due + 5.0
    assert window.snapshot(now).max_seconds == pytest.approx(5.0)  # also while it lasts
    window.beat(now)
    snapshot = window.snapshot(now)
    assert snapshot.samples == 100
    assert snapshot.p50_seconds == pytest.approx(0.0, abs=0.11)
    assert snapshot.p99_seconds == pytest.approx(4.9, abs=0.11)
    assert snapshot.max_seconds == pytest.approx(5.0)


def test_the_window_slides() -> None:
    window = loop_lag.LagWindow(0.0, 0.1, 1.0)
    window.beat(2.1)
    for _ in range(10):
        window.beat(window.due)
    snapshot = window.snapshot(window.due - 0.05)
    assert snapshot.samples == 10
    assert snapshot.max_seconds == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.9, 4), (1.0, 4)])
def test_quantiles_are_values_that_occurred(share: float, value: float) -> None:
    assert loop_lag.quantile([1, 2, 3, 4], share) == value
    assert loop_lag.quantile([], share) == 0.0


class Told(logging.Handler):
    """Hands on what is logged, and lets a thread wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: SimpleQueue[str] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put(record.getMessage())


@pytest.fixture
def told() -> Iterator[Told]:
    handler = Told()
    logger = logging.getLogger("openenvd.system.process.loop_lag")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def hold_until_told(told: Told) -> str:
    return told.lines.get(timeout=60)


async def test_a_stall_is_logged_once_with_its_stack_and_the_next_one_again(told: Told) -> None:
    with loop_lag.EventLoopLagMonitor("collector", stall_seconds=0.05):
        line = hold_until_told(told)
        assert line.startswith("collector is blocked for 0.")
        assert "in hold_until_told" in line
        time.sleep(0.2)  # the same stall
        assert told.lines.empty()
        await asyncio.sleep(0.5)
        assert "is blocked for" in hold_until_told(told)


async def test_time_between_works_is_no_lag_and_a_stall_at_their_end_is(paused: Paused) -> None:
    monitor, clock = paused
    for _ in range(2):
        monitor.resume()
        monitor.resume()
        monitor.pause()
        monitor.pause()
        await until_paused(monitor, clock)
        clock.now += 100
    snapshot = monitor.snapshot()
    assert snapshot.samples >= 2 * loop_lag.LINGER_SAMPLES
    assert snapshot.max_seconds < 1
    with monitor.watching(), monitor.watching():
        clock.now += 3.0
    await until_paused(monitor, clock)
    assert monitor.snapshot().max_seconds == pytest.approx(3.0, abs=0.1)


async def until_paused(monitor: loop_lag.EventLoopLagMonitor, clock: Clock | None = None) -> None:
    while monitor._timer is not None:
        if clock is not None:
            clock.now += 0.001
        await asyncio.sleep(0.001)
