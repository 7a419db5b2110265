# SPDX-License-Identifier: Apache-2.0
"""A few steps are taken in each iteration of the event loop, in order."""

from __future__ import annotations

import asyncio
import itertools

from openenvd.rollouts.episode_runner import StepTurns


async def test_a_few_steps_are_taken_in_each_iteration_in_order() -> None:
    turns, passed, seen = StepTurns(3), list[int](), list[int]()

    async def one(number: int) -> None:
        await turns.take()
        passed.append(number)

    def look() -> None:
        seen.append(len(passed))
        if len(passed) < 12:
            asyncio.get_running_loop().call_soon(look)

    tasks = [asyncio.create_task(one(number)) for number in range(12)]
    look()
    await asyncio.gather(*tasks)
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


async def test_a_single_episode_never_waits() -> None:
    turns = StepTurns(1)
    for _ in range(5):
        async with asyncio.timeout(60):
            await turns.take()


async def test_a_cancelled_step_takes_no_turn() -> None:
    turns = StepTurns(1)
    tasks = [asyncio.create_task(turns.take()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(d, asyncio.CancelledError) for d in done] == [0, 1, 1, 1, 0, 0]
