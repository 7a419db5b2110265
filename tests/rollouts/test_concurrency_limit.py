# SPDX-License-Identifier: Apache-2.0
"""How many episodes may run is learned from what they were seen to hold."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from openenvd.rollouts.buffers import (
    FOLLOWERS,
    GUESSED_STEPS,
    OBSERVATIONS,
    SCOUTS,
    ConcurrencyLimit,
)


async def begin(limit: ConcurrencyLimit, stack: AsyncExitStack, begun: list[int]) -> None:
    await stack.enter_async_context(limit.enter())
    begun.append(1)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_few_episodes_begin_and_others_follow_within_the_memory() -> None:
    limit = ConcurrencyLimit(100 * OBSERVATIONS * 1000, keeps_episodes=False)
    begun: list[int] = []
    async with AsyncExitStack() as stack:
        scouts = [await stack.enter_async_context(limit.enter()) for _ in range(SCOUTS)]
        others = [asyncio.create_task(begin(limit, stack, begun)) for _ in range(200)]
        await settle()
        assert begun == []
        for taken in range(1, 12):
            scouts[taken % SCOUTS].step(10, 1000)
            await settle()
            assert len(begun) == FOLLOWERS * taken
        for _ in range(100):
            scouts[0].step(10, 1000)
            await settle()
        assert len(begun) == 100 - SCOUTS
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    assert limit.peak_bytes <= 100 * OBSERVATIONS * 1000


async def test_an_episode_that_ends_before_its_first_step_lets_others_begin() -> None:
    limit = ConcurrencyLimit(1000, keeps_episodes=False)
    async with limit.enter():
        pass
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        await stack.enter_async_context(limit.enter())


async def test_whole_episodes_that_are_kept_count_with_all_their_steps() -> None:
    limit = ConcurrencyLimit(10_000, keeps_episodes=True)
    async with limit.enter() as room:
        for _ in range(5):
            room.step(3000, 3000)
        assert limit.peak_bytes == 15_000  # it is never kept waiting in the middle


async def test_the_size_of_whole_episodes_is_estimated_until_one_has_ended() -> None:
    """All that began after the first step of one held six times the limit in the end."""
    limit = ConcurrencyLimit(16 * GUESSED_STEPS * 1000, keeps_episodes=True)
    begun: list[int] = []
    async with AsyncExitStack() as stack:
        scouts = [await stack.enter_async_context(limit.enter()) for _ in range(SCOUTS)]
        others = [asyncio.create_task(begin(limit, stack, begun)) for _ in range(200)]
        for scout in scouts:
            scout.step(1000, 1000)
            await settle()
        assert 12 < len(begun) < 16 < FOLLOWERS * SCOUTS
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
