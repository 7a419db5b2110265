# SPDX-License-Identifier: Apache-2.0
"""The intake: so many bytes pass in each turn of the loop, in their order, and none is lost."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import EpisodeStatus, FailureReason
from openenvd.rollouts.sessions import session_pool
from openenvd.rollouts.sessions.loop_budget import AT_ONCE_SECONDS, LEAST_BYTES, Intake
from openenvd.rollouts.sessions.message_memory import MessageMemory
from openenvd.rollouts.sessions.wire import Receiving

from .conftest import Serve, address_of


def receive_at_once(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """So little, that everybody has to wait for it."""

    def receiving(memory: MessageMemory) -> Receiving:
        return Receiving(memory, Intake(at_once_bytes=size_bytes))

    monkeypatch.setattr(session_pool, "Receiving", receiving)


async def test_so_many_bytes_pass_in_each_turn_of_the_loop_in_their_order() -> None:
    intake, size_bytes, passed = Intake(at_once_bytes=3 * LEAST_BYTES), LEAST_BYTES, []

    def take(number: int) -> None:
        passed.append(number)
        intake.admits(size_bytes)

    for number in range(12):
        if intake.is_open:
            take(number)
        else:
            intake.wait(size_bytes, lambda number=number: take(number))  # type: ignore[misc]
    seen = [0, len(passed)]
    while seen[-1] < 12:
        await asyncio.sleep(0)
        seen.append(len(passed))
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


async def test_after_something_large_nothing_passes_until_the_next_turn() -> None:
    intake = Intake(at_once_bytes=10)
    seen = [intake.is_open, intake.admits(1000), intake.is_open]
    await asyncio.sleep(0.01)
    assert [*seen, intake.is_open] == [True, False, False, True]


async def test_a_turn_that_has_taken_long_is_over_however_little_has_come() -> None:
    now = 0.0
    intake = Intake(at_once_bytes=1000, clock=lambda: now)
    assert intake.admits(1)
    now += AT_ONCE_SECONDS
    assert intake.admits(1)
    now += AT_ONCE_SECONDS
    assert not intake.admits(1)
    passed: list[float] = []
    intake.wait(1, lambda: passed.append(now))
    await asyncio.sleep(0)
    assert (passed, intake.is_open) == ([now], True)
    assert intake.admits(1)


async def test_each_turn_has_its_own_time_while_somebody_waits() -> None:
    """The clock of the turn before would let one message pass in each."""
    now = 0.0
    intake = Intake(at_once_bytes=10 * LEAST_BYTES, clock=lambda: now)
    intake.admits(11 * LEAST_BYTES)
    for _ in range(20):
        intake.wait(1, lambda: None)
    now += 10 * AT_ONCE_SECONDS
    await asyncio.sleep(0)
    assert [intake.admits(1), intake.admits(1), intake.admits(1)] == [True, True, True]


async def test_answers_that_wait_arrive_whole(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_at_once(monkeypatch, 1000)
    policy = {"what": "go", "size": 700_000}
    collector = RolloutCollector(address_of(serve()), lambda _: policy, concurrency=8)
    async for batch in collector.batches(1, episodes=16):
        (episode,) = batch
        assert episode.status is EpisodeStatus.DONE
        assert all(step.observation["text"] == "x" * 700_000 for step in episode.steps[1:])


async def test_a_server_that_dies_meanwhile_is_noticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_pool, "RETURN_SECONDS", 0.1)
    monkeypatch.setattr(session_pool, "PAUSE_SECONDS", 0.02)
    receive_at_once(monkeypatch, 1)

    def policy(observation: dict[str, Any]) -> dict[str, Any]:
        return {"what": "exit" if observation["step"] == 2 else "go", "size": 700_000}

    collector = RolloutCollector(address_of(serve()), policy, concurrency=6, retries=0)
    async with asyncio.timeout(60):
        episodes = [e async for batch in collector.batches(6, episodes=6) for e in batch]
    reasons = {episode.failure.reason for episode in episodes if episode.failure}
    assert reasons <= {FailureReason.CONNECTION_LOST, FailureReason.NOT_CONNECTED}
    assert len(reasons) >= 1
