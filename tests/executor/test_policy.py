# SPDX-License-Identifier: Apache-2.0
"""Plan, scaling, frames and admission: pure functions, by table."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from openenvd.executor.errors import FrameError, PlanError
from openenvd.executor.messages import LONG, SHORT, FrameReader, encode_frame
from openenvd.executor.policy.memory import (
    LONE_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    FreeMemory,
    Need,
    admit,
)
from openenvd.executor.policy.plan import (
    BURST_LONG_PER_CPU,
    MIN_TASK_BYTES,
    Plan,
    back_off_seconds,
    plan_workers,
    reason_to_recycle,
    workers_wanted,
)
from openenvd.executor.supervisor.pool import Pool, PooledWorker, Stage

from .executor_bench import Bench, make_plan

MB = 2**20


@dataclass
class Machine:
    """As much of `Limits` as the plan reads."""

    cpus: float
    memory_bytes: int
    pids: int | None = None
    machine_memory_bytes: int = 2**40


def plan(machine: Any, **settings: Any) -> Any:
    expected = {LONG: 128 * MB, SHORT: 32 * MB}
    return plan_workers(machine, daemon_bytes=90 * MB, expected=expected, **settings)


def test_a_small_machine_gets_a_working_plan_or_is_told_what_it_needs() -> None:
    """SkyPilot #6604: below 1 GB the server hung at its start."""
    small = plan(Machine(0.5, 750 * MB))
    assert (small.guaranteed_long, small.guaranteed_short) == (1, 1)
    assert small.capacity(LONG) >= 3
    with pytest.raises(PlanError) as caught:
        plan(Machine(1, 200 * MB))
    assert "200 MB of memory are too few" in caught.value.message
    assert "or more" in str(caught.value.hint)


@pytest.mark.parametrize("memory_mb", [300, 512, 750, 2048, 16_384, 262_144])
@pytest.mark.parametrize("cpus", [0.5, 1, 4, 96])
def test_a_plan_sets_no_more_aside_than_its_budget(memory_mb: int, cpus: float) -> None:
    made = plan(Machine(cpus, memory_mb * MB))
    shares = made.guaranteed_long * made.long_bytes + made.guaranteed_short * made.short_bytes
    assert made.burst_bytes == made.budget_bytes - shares >= 0
    least = made.burst_long * MIN_TASK_BYTES + made.burst_short * made.short_bytes
    assert least <= made.burst_bytes
    assert made.burst_long <= BURST_LONG_PER_CPU * max(1, cpus)
    assert made.budget_bytes + made.reserve_bytes + 90 * MB == memory_mb * MB


def test_settings_and_the_pids_limit_bound_the_plan_and_a_cgroup_halves_the_reserve() -> None:
    made = plan(
        Machine(4, 16_384 * MB),
        max_long=3,
        max_short=2,
        worker_memory_bytes=256 * MB,
        reserve_bytes=100 * MB,
    )
    assert (made.capacity(LONG), made.capacity(SHORT)) == (3, 2)
    assert (made.worker_bytes, made.reserve_bytes) == (256 * MB, 100 * MB)
    # SkyPilot #10559: 40 launches made 1,805 threads, and hit the limit.
    made = plan(Machine(4, 262_144 * MB, pids=256))
    assert made.capacity(LONG) + made.capacity(SHORT) <= 32
    group, machine = Machine(1, 2000 * MB), Machine(1, 2000 * MB, machine_memory_bytes=2000 * MB)
    assert (plan(group).reserve_bytes, plan(machine).reserve_bytes) == (100 * MB, 200 * MB)


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ({}, 0),  # nothing has been asked of it yet
        ({"kept": 1}, 1),  # the one that is kept has died
        ({"waiting": 2}, 2),  # a guaranteed place is filled when there is work for it
        ({"living": 2, "idle": 2}, 0),
        ({"living": 2, "waiting": 3}, 3),  # a burst
        ({"living": 2, "waiting": 9}, 4),  # no further than the capacity
        ({"living": 2, "waiting": 9, "requested": 1}, 3),  # of which those on their way take a part
        ({"living": 2, "waiting": 3, "requested": 3}, 0),  # on their way already
        ({"kept": 1, "living": 1, "leaving": 1}, 0),  # replaced once it is gone
        ({"kept": 1, "living": 1, "leaving": 1, "waiting": 1}, 1),  # work does not wait
        ({"living": 2, "waiting": 3, "schedule": SHORT}, 1),  # SHORT bursts one by one
    ],
)
def test_workers_wanted(state: dict[str, Any], wanted: int) -> None:
    none: dict[str, Any] = {"living": 0, "leaving": 0, "idle": 0, "waiting": 0, "requested": 0}
    given: dict[str, Any] = {"schedule": LONG, "kept": 0, "capacity": 6} | none | state
    assert workers_wanted(**given) == wanted


def test_a_worker_that_leaves_is_replaced_only_for_work() -> None:
    pool = Pool(LONG, Plan(2, 1, 4, 0, budget_bytes=0, reserve_bytes=0))
    pipe, other = socket.socketpair()
    with pipe, other:
        for ordinal in (1, 2):
            pool.add(PooledWorker(f"long-{ordinal}", pool, ordinal, True, 1, 0.0, pipe, None, 1))
        pool.enter(pool.workers[2], Stage.LEAVING)
        assert pool.wanted() == 0
        pool.waiting.extend([None] * 9)  # type: ignore[list-item]
        assert pool.wanted() == 5  # of six, beside the one that stays


def test_a_worker_is_recycled_once_it_has_grown_and_back_off_grows_to_a_bound() -> None:
    assert reason_to_recycle(grown_bytes=None) is None
    assert reason_to_recycle(grown_bytes=MB) is None
    assert reason_to_recycle(grown_bytes=500 * MB) == "it had grown by 500 MB"
    waits = [back_off_seconds(failures) for failures in range(100)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] == 5.0


def test_frames_are_parsed_however_the_stream_is_split_or_refused() -> None:
    messages = [{"n": n, "text": "x" * n} for n in range(50)]
    stream = b"".join(encode_frame(message) for message in messages)
    reader = FrameReader()
    heard = [
        frame
        for start in range(0, len(stream), 7)
        for frame in reader.feed(stream[start : start + 7])
    ]
    assert heard == messages
    with pytest.raises(FrameError):
        FrameReader().feed(b"\xff\xff\xff\xff rubbish")
    with pytest.raises(FrameError):
        FrameReader().feed(b"\x02\x00\x00\x00{[")


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


def test_no_more_start_than_workers_a_waiting_task_has_a_reason_and_all_fit_in_much() -> None:
    assert admitted([10, 10, 10], memory(1000), most=2) == "ab"
    found = admit([Need("a", 210 * MB, NOW)], memory(95), most=8, now=NOW)
    assert found.short["a"].sentence() == "waiting for memory: needs 210 MB, 95 MB free"
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


def test_a_peak_is_the_tasks_own_and_new_tasks_count_before_the_machine_is_read(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    assert (bench.run("echo").peak_bytes or 0) < 20 * MB
    grown = bench.run("grow", {"size": 50 * MB}).peak_bytes  # which holds it twice
    assert 95 * MB <= grown < 130 * MB
    family = bench.run("grow_child", {"size": 50 * MB}).peak_bytes
    assert 95 * MB <= family < 150 * MB
    assert bench.run("grow_child", {"size": 50 * MB}).peak_bytes >= 95 * MB  # every time
    before = bench.executor.free_memory(LONG).available_bytes
    bench.submit("hang", schedule=LONG, expected_bytes=100 * MB)
    assert bench.executor.free_memory(LONG).available_bytes <= before - 50 * MB
