# SPDX-License-Identifier: Apache-2.0
"""Memory that episodes share: in order, given back however they end; and how many may run."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from openenvd.rollouts import buffers

KB = 1024


async def test_waiting_reservations_are_served_in_order() -> None:
    """A small one does not pass a large one for ever."""
    budget = buffers.ByteBudget(10 * KB)
    first, second = await budget.reserve(6 * KB), await budget.reserve(3 * KB)
    large = asyncio.create_task(budget.reserve(9 * KB))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert not small.done()
    budget.change(-first)
    await asyncio.sleep(0)
    assert not large.done()
    budget.change(-second)
    await large
    await small


async def test_a_large_reservation_passes_alone_and_a_hold_grows_and_shrinks() -> None:
    budget = buffers.ByteBudget(10 * KB)
    first = await budget.reserve(KB)
    huge = asyncio.create_task(budget.reserve(100 * KB))
    await asyncio.sleep(0)
    assert not huge.done()
    budget.change(-first)
    hold = await huge
    after = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert not after.done()
    budget.change(-hold)
    await after
    budget = buffers.ByteBudget(10 * KB)
    hold = await budget.reserve(KB)
    budget.change(20 * KB - hold)
    assert budget.used_bytes == 20 * KB
    other = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert not other.done()
    budget.change(-18 * KB)
    await other


async def test_a_cancelled_reservation_is_released_and_who_waits_behind_it_admitted() -> None:
    budget = buffers.ByteBudget(10 * KB)
    first = await budget.reserve(10 * KB)
    gone = asyncio.create_task(budget.reserve(9 * KB))
    await asyncio.sleep(0)
    budget.change(-first)  # there is room for it; it has not run yet
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert budget.used_bytes == 0
    # So that the number of tiny things is bounded, too.
    assert await buffers.ByteBudget(KB).reserve(0) == buffers.MIN_BYTES
    budget = buffers.ByteBudget(10 * KB)
    await budget.reserve(5 * KB)
    large = asyncio.create_task(budget.reserve(9 * KB))
    small = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    large.cancel()
    assert await small == KB


async def begin(limit: buffers.ConcurrencyLimit, stack: AsyncExitStack, begun: list[int]) -> None:
    await stack.enter_async_context(limit.enter())
    begun.append(1)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_few_episodes_begin_and_others_follow_within_the_memory() -> None:
    limit = buffers.ConcurrencyLimit(100 * buffers.OBSERVATIONS * 1000, keeps_episodes=False)
    begun: list[int] = []
    async with AsyncExitStack() as stack:
        scouts = [await stack.enter_async_context(limit.enter()) for _ in range(buffers.SCOUTS)]
        others = [asyncio.create_task(begin(limit, stack, begun)) for _ in range(200)]
        await settle()
        assert begun == []
        for taken in range(1, 12):
            scouts[taken % buffers.SCOUTS](10, 1000)
            await settle()
            assert len(begun) == buffers.FOLLOWERS * taken
        for _ in range(100):
            scouts[0](10, 1000)
            await settle()
        assert len(begun) == 100 - buffers.SCOUTS
        assert limit.budget.used_bytes <= 100 * buffers.OBSERVATIONS * 1000
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_an_episode_that_ends_early_lets_others_begin_and_whole_ones_count_whole() -> None:
    limit = buffers.ConcurrencyLimit(1000, keeps_episodes=False)
    async with limit.enter():
        pass
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        await stack.enter_async_context(limit.enter())
    limit = buffers.ConcurrencyLimit(10_000, keeps_episodes=True)
    async with limit.enter() as room:
        for _ in range(5):
            room(3000, 3000)
        assert limit.budget.used_bytes == 15_000  # it is never kept waiting in the middle


async def test_the_size_of_whole_episodes_is_estimated_until_one_has_ended() -> None:
    """All that began after the first step of one held six times the limit in the end."""
    limit = buffers.ConcurrencyLimit(16 * buffers.GUESSED_STEPS * 1000, keeps_episodes=True)
    begun: list[int] = []
    async with AsyncExitStack() as stack:
        scouts = [await stack.enter_async_context(limit.enter()) for _ in range(buffers.SCOUTS)]
        others = [asyncio.create_task(begin(limit, stack, begun)) for _ in range(200)]
        for scout in scouts:
            scout(1000, 1000)
            await settle()
        assert 12 < len(begun) < 16 < buffers.FOLLOWERS * buffers.SCOUTS
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
