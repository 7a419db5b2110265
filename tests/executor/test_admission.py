# SPDX-License-Identifier: Apache-2.0
"""Who may start, by memory: a pure function, by table; and the books it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenvd.executor.messages import LONG, SHORT
from openenvd.executor.policy.memory import (
    LONE_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    FreeMemory,
    Need,
    admit,
)

from .executor_bench import Bench, make_plan

MB = 2**20
NOW = 1000.0


def memory(burst: int, available: int = 10_000, **others: Any) -> FreeMemory:
    others = {"schedule": LONG, "share_bytes": 60 * MB, **others}
    return FreeMemory(burst_bytes=burst * MB, available_bytes=available * MB, **others)


def admitted(sizes: list[int], free: FreeMemory, *, most: int = 64, waited: float = 0.0) -> str:
    """`a`, `b`, … for the tasks that start; the first of them has `waited`."""
    needs = [
        Need("abcdefgh"[i], size * MB, NOW - (waited if i == 0 else 0.0))
        for i, size in enumerate(sizes)
    ]
    return "".join(admit(needs, free, most=most, now=NOW).chosen)


LONG_WAIT = PATIENCE_SECONDS
VERY_LONG_WAIT = LONE_PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("sizes", "free", "waited", "starts"),
    [
        ([150, 150, 150], memory(320), 0, "ab"),  # as many as fit
        ([150, 150], memory(0), 0, ""),
        ([60], memory(0, guaranteed_free=1), 0, "a"),  # a guaranteed worker's share is its own
        ([60, 60], memory(0, guaranteed_free=1), 0, "a"),
        ([100], memory(40, guaranteed_free=1), 0, "a"),  # its share, and what it needs beyond
        ([100], memory(39, guaranteed_free=1), 0, ""),
        ([400, 50, 50], memory(100), 0, "bc"),  # small ones pass a big one
        ([400, 50, 50], memory(100), LONG_WAIT, ""),  # which has waited long enough
        ([400, 50], memory(100, is_alone=True), 0, "a"),  # alone, it starts whatever the books say
        ([50, 400], memory(100, is_alone=True), 0, "a"),  # but not beside another
        ([100, 100], memory(500, 150), 0, "a"),  # the machine has less than the books say
        ([60], memory(500, 50, guaranteed_free=1), 0, ""),  # also for a guaranteed LONG worker
        ([60], memory(500, 50, guaranteed_free=1, schedule=SHORT), 0, "a"),  # `down` frees memory
        ([100], memory(500, 60, is_alone=True), LONG_WAIT, ""),
        ([100], memory(500, 60, is_alone=True), VERY_LONG_WAIT, "a"),  # it may be no more than 60
        ([100], memory(500, 40, is_alone=True), VERY_LONG_WAIT, ""),  # that is hopeless
        # What it waits for is not ours to give: the others need not wait with it.
        ([100, 30], memory(500, 40, is_alone=True), LONG_WAIT, "b"),
    ],
)
def test_which_tasks_start(sizes: list[int], free: FreeMemory, waited: float, starts: str) -> None:
    assert admitted(sizes, free, waited=waited) == starts


def test_no_more_start_than_there_are_workers_for() -> None:
    assert admitted([10, 10, 10], memory(1000), most=2) == "ab"


def test_a_waiting_task_has_a_reason() -> None:
    found = admit([Need("a", 210 * MB, NOW)], memory(95), most=8, now=NOW)
    assert found.short["a"].sentence() == "waiting for memory: needs 210 MB, 95 MB free"


def test_any_tasks_fit_when_free_memory_exceeds_their_largest_needs() -> None:
    assert memory(640, 10_000).fits_all(64, 10 * MB)
    assert not memory(640, 639).fits_all(64, 10 * MB)


def test_what_tasks_need_beyond_the_shares_is_taken_off_the_burst(
    make_bench: Callable[..., Bench],
) -> None:
    plan = make_plan(long_bytes=60 * MB, short_bytes=30 * MB)
    bench = make_bench(plan)
    assert plan.burst_bytes == 1024 * MB - 2 * 60 * MB - 2 * 30 * MB
    first = bench.submit("hang", schedule=LONG, expected_bytes=50 * MB)
    bench.submit("hang", schedule=LONG, expected_bytes=100 * MB)
    free = bench.executor.free_memory(LONG)
    assert free.burst_bytes == plan.burst_bytes - 30 * MB
    assert (free.guaranteed_free, free.is_alone) == (0, False)
    third = bench.submit("hang", schedule=LONG, expected_bytes=100 * MB)
    assert bench.executor.free_memory(SHORT).burst_bytes == plan.burst_bytes - 130 * MB
    assert bench.executor.free_memory(SHORT).guaranteed_free == 2
    for task_id in (first, third):
        bench.executor.cancel(task_id)
        bench.recorder.outcome(task_id)
    assert bench.executor.free_memory(LONG).burst_bytes == plan.burst_bytes - 40 * MB


def test_tasks_submitted_since_the_machine_was_last_read_are_counted(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    before = bench.executor.free_memory(LONG).available_bytes
    bench.submit("hang", schedule=LONG, expected_bytes=100 * MB)
    assert bench.executor.free_memory(LONG).available_bytes <= before - 50 * MB


def test_a_peak_is_what_the_task_itself_used(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    assert (bench.run("echo").peak_bytes or 0) < 20 * MB
    grown = bench.run("grow", {"size": 50 * MB}).peak_bytes  # which holds it twice
    assert 95 * MB <= grown < 130 * MB
    family = bench.run("grow_child", {"size": 50 * MB}).peak_bytes
    assert 95 * MB <= family < 150 * MB
    assert bench.run("grow_child", {"size": 50 * MB}).peak_bytes >= 95 * MB  # every time
