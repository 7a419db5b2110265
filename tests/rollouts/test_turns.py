# SPDX-License-Identifier: Apache-2.0
"""Turns of the loop: a few pass in each, in their order, and timers come in between."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from openenvd.rollouts.loop_budget import TURN_SECONDS, Turns, at_once_after


async def pass_all(turns: Turns, count: int) -> tuple[list[int], list[int]]:
    """Who passed, in order; and how many had, in each turn of the loop."""
    passed: list[int] = []
    seen: list[int] = []

    async def one(number: int) -> None:
        await turns.take()
        passed.append(number)

    def look() -> None:
        seen.append(len(passed))
        if len(passed) < count:
            asyncio.get_running_loop().call_soon(look)

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    look()
    await asyncio.gather(*tasks)
    return passed, seen


async def test_a_few_pass_in_each_turn_of_the_loop_in_their_order() -> None:
    turns = Turns(at_once=3, most=3)
    passed, seen = await pass_all(turns, 12)
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


async def test_alone_nobody_waits() -> None:
    turns = Turns(at_once=1, most=1)
    for _ in range(5):
        async with asyncio.timeout(60):
            await turns.take()


async def test_who_is_cancelled_costs_nobody_a_turn() -> None:
    turns = Turns(at_once=1, most=1)
    tasks = [asyncio.create_task(turns.take()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(d, asyncio.CancelledError) for d in done] == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("at_once", "took_seconds", "then"),
    [
        (16, TURN_SECONDS, 17),  # in time: one more
        (16, 4 * TURN_SECONDS, 4),
        (16, 1000 * TURN_SECONDS, 1),  # somebody always passes
        (64, 0.0, 64),  # and never more than so many
    ],
)
def test_how_many_pass_follows_from_what_the_turn_before_cost(
    at_once: int, took_seconds: float, then: int
) -> None:
    assert at_once_after(at_once, took_seconds, most=64) == then


async def test_turns_that_cost_much_let_few_pass() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 8 * TURN_SECONDS  # so much in each turn
        return now

    turns = Turns(at_once=8, most=64, clock=clock)
    passed, seen = await pass_all(turns, 20)
    assert passed == list(range(20))
    assert {b - a for a, b in itertools.pairwise(seen[4:])} <= {0, 1}
