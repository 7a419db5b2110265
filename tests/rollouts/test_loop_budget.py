# SPDX-License-Identifier: Apache-2.0
"""What one iteration of the event loop does is limited, in order, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import EpisodeStatus, FailureReason
from openenvd.rollouts.loop_budget import (
    ITERATION_SECONDS,
    LEAST_BYTES,
    RECEIVE_SECONDS,
    ReceiveBudget,
    StepBudget,
    steps_after,
)
from openenvd.rollouts.sessions import session_pool
from openenvd.rollouts.sessions.message_memory import MessageMemory
from openenvd.rollouts.sessions.session import Receiving
from openenvd.rollouts.sessions.session_pool import SessionTiming

from .conftest import Serve, address_of


async def pass_all(budget: StepBudget, count: int) -> tuple[list[int], list[int]]:
    """Which steps passed, in order; and how many had passed in each iteration of the loop."""
    passed: list[int] = []
    seen: list[int] = []

    async def one(number: int) -> None:
        await budget.acquire()
        passed.append(number)

    def look() -> None:
        seen.append(len(passed))
        if len(passed) < count:
            asyncio.get_running_loop().call_soon(look)

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    look()
    await asyncio.gather(*tasks)
    return passed, seen


async def test_a_few_steps_pass_in_each_iteration_of_the_loop_in_order() -> None:
    budget = StepBudget(steps=3, max_steps=3)
    passed, seen = await pass_all(budget, 12)
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


async def test_a_single_episode_never_waits() -> None:
    budget = StepBudget(steps=1, max_steps=1)
    for _ in range(5):
        async with asyncio.timeout(60):
            await budget.acquire()


async def test_a_cancelled_step_uses_no_budget() -> None:
    budget = StepBudget(steps=1, max_steps=1)
    tasks = [asyncio.create_task(budget.acquire()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(d, asyncio.CancelledError) for d in done] == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("steps", "took_seconds", "then"),
    [
        (16, ITERATION_SECONDS, 17),  # in time: one more
        (16, 4 * ITERATION_SECONDS, 4),
        (16, 1000 * ITERATION_SECONDS, 1),  # somebody always passes
        (64, 0.0, 64),  # and never more than so many
    ],
)
def test_how_many_steps_pass_follows_from_the_cost_of_the_iteration_before(
    steps: int, took_seconds: float, then: int
) -> None:
    assert steps_after(steps, took_seconds, max_steps=64) == then


async def test_expensive_iterations_let_few_steps_pass() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 8 * ITERATION_SECONDS  # so much in each turn
        return now

    budget = StepBudget(steps=8, max_steps=64, clock=clock)
    passed, seen = await pass_all(budget, 20)
    assert passed == list(range(20))
    assert {b - a for a, b in itertools.pairwise(seen[4:])} <= {0, 1}


def receive_at_once(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Sets a budget so small that each connection has to wait for it."""

    def receiving(memory: MessageMemory) -> Receiving:
        return Receiving(memory, ReceiveBudget(max_bytes=size_bytes))

    monkeypatch.setattr(session_pool, "Receiving", receiving)


async def test_an_iteration_receives_at_most_its_bytes_and_the_rest_in_order_later() -> None:
    budget, size_bytes, passed = ReceiveBudget(max_bytes=3 * LEAST_BYTES), LEAST_BYTES, []

    def take(number: int) -> None:
        passed.append(number)
        budget.spend(size_bytes)

    for number in range(12):
        if budget.is_open:
            take(number)
        else:
            budget.wait(size_bytes, lambda number=number: take(number))  # type: ignore[misc]
    seen = [0, len(passed)]
    while seen[-1] < 12:
        await asyncio.sleep(0)
        seen.append(len(passed))
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


async def test_after_a_large_message_nothing_is_received_until_the_next_iteration() -> None:
    budget = ReceiveBudget(max_bytes=10)
    seen = [budget.is_open, budget.spend(1000), budget.is_open]
    await asyncio.sleep(0.01)
    assert [*seen, budget.is_open] == [True, False, False, True]


async def test_an_iteration_that_took_long_receives_no_more() -> None:
    now = 0.0
    budget = ReceiveBudget(max_bytes=1000, clock=lambda: now)
    assert budget.spend(1)
    now += RECEIVE_SECONDS
    assert budget.spend(1)
    now += RECEIVE_SECONDS
    assert not budget.spend(1)
    passed: list[float] = []
    budget.wait(1, lambda: passed.append(now))
    await asyncio.sleep(0)
    assert (passed, budget.is_open) == ([now], True)
    assert budget.spend(1)


async def test_each_iteration_has_its_own_time_while_connections_wait() -> None:
    """With the clock of the iteration before, one message would pass in each."""
    now = 0.0
    budget = ReceiveBudget(max_bytes=10 * LEAST_BYTES, clock=lambda: now)
    budget.spend(11 * LEAST_BYTES)
    for _ in range(20):
        budget.wait(1, lambda: None)
    now += 10 * RECEIVE_SECONDS
    await asyncio.sleep(0)
    assert [budget.spend(1), budget.spend(1), budget.spend(1)] == [True, True, True]


async def test_answers_that_wait_for_the_budget_arrive_whole(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_at_once(monkeypatch, 1000)
    policy = {"what": "go", "size": 700_000}
    collector = RolloutCollector(address_of(serve()), lambda _: policy, concurrency=8)
    async for batch in collector.batches(1, episodes=16):
        (episode,) = batch
        assert episode.status is EpisodeStatus.DONE
        assert all(step.observation["text"] == "x" * 700_000 for step in episode.steps[1:])


async def test_a_server_that_exits_while_its_answers_wait_is_noticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_at_once(monkeypatch, 1)

    def policy(observation: dict[str, Any]) -> dict[str, Any]:
        return {"what": "exit" if observation["step"] == 2 else "go", "size": 700_000}

    timing = SessionTiming(pause_seconds=0.02, reconnect_seconds=0.1)
    collector = RolloutCollector(
        address_of(serve()), policy, concurrency=6, retries=0, timing=timing
    )
    async with asyncio.timeout(60):
        episodes = [e async for batch in collector.batches(6, episodes=6) for e in batch]
    reasons = {episode.failure.reason for episode in episodes if episode.failure}
    assert reasons <= {FailureReason.CONNECTION_LOST, FailureReason.NOT_CONNECTED}
    assert len(reasons) >= 1
