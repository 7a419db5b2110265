# SPDX-License-Identifier: Apache-2.0
"""Plan, scaling and frames: pure functions, by table."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import pytest

from openenvd.executor.errors import FrameError, PlanError
from openenvd.executor.messages import LONG, SHORT, FrameReader, encode_frame
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


def test_a_small_machine_gets_a_working_plan() -> None:
    """SkyPilot #6604: below 1 GB the server hung at its start."""
    small = plan(Machine(0.5, 750 * MB))
    assert (small.guaranteed_long, small.guaranteed_short) == (1, 1)
    assert small.capacity(LONG) >= 3


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


def test_a_plan_for_too_little_memory_fails_with_the_amount_needed() -> None:
    with pytest.raises(PlanError) as caught:
        plan(Machine(1, 200 * MB))
    assert "200 MB of memory are too few" in caught.value.message
    assert "or more" in caught.value.hint


def test_settings_bound_the_plan() -> None:
    made = plan(
        Machine(4, 16_384 * MB),
        max_long=3,
        max_short=2,
        worker_memory_bytes=256 * MB,
        reserve_bytes=100 * MB,
    )
    assert (made.capacity(LONG), made.capacity(SHORT)) == (3, 2)
    assert (made.worker_bytes, made.reserve_bytes) == (256 * MB, 100 * MB)


def test_a_cgroup_keeps_half_of_a_machines_reserve() -> None:
    group, machine = Machine(1, 2000 * MB), Machine(1, 2000 * MB, machine_memory_bytes=2000 * MB)
    assert (plan(group).reserve_bytes, plan(machine).reserve_bytes) == (100 * MB, 200 * MB)


def test_the_pids_limit_bounds_the_plan() -> None:
    """SkyPilot #10559: 40 launches made 1,805 threads, and hit the limit."""
    made = plan(Machine(4, 262_144 * MB, pids=256))
    assert made.capacity(LONG) + made.capacity(SHORT) <= 32


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
            pool.add(PooledWorker(f"long-{ordinal}", LONG, ordinal, True, 1, 0.0, pipe, None, 1))
        pool.enter(pool.workers[2], Stage.LEAVING)
        assert pool.wanted() == 0
        pool.waiting.extend([None] * 9)  # type: ignore[list-item]
        assert pool.wanted() == 5  # of six, beside the one that stays


def test_a_worker_is_recycled_once_it_has_grown() -> None:
    assert reason_to_recycle(grown_bytes=None) is None
    assert reason_to_recycle(grown_bytes=MB) is None
    assert reason_to_recycle(grown_bytes=500 * MB) == "it had grown by 500 MB"


def test_back_off_grows_to_a_bound() -> None:
    waits = [back_off_seconds(failures) for failures in range(100)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] == 5.0


def test_frames_are_parsed_however_the_stream_is_split() -> None:
    messages = [{"n": n, "text": "x" * n} for n in range(50)]
    stream = b"".join(encode_frame(message) for message in messages)
    reader = FrameReader()
    heard = [
        frame
        for start in range(0, len(stream), 7)
        for frame in reader.feed(stream[start : start + 7])
    ]
    assert heard == messages


def test_invalid_frames_are_refused() -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(b"\xff\xff\xff\xff rubbish")
    with pytest.raises(FrameError):
        FrameReader().feed(b"\x02\x00\x00\x00{[")
