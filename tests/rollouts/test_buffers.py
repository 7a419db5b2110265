# SPDX-License-Identifier: Apache-2.0
"""One budget in bytes from the session to the disk."""

from __future__ import annotations

import asyncio
import threading

import pytest

from openenvd.rollouts.buffers import LEAST_BYTES, ByteBudget, admits

KB = 1024


@pytest.mark.parametrize(
    ("used", "size", "limit", "fits"),
    [(0, 5, 10, True), (5, 5, 10, True), (6, 5, 10, False), (0, 50, 10, True), (1, 50, 10, False)],
)
def test_a_reservation_is_admitted_where_it_fits_or_nothing_is_reserved(
    used: int, size: int, limit: int, fits: bool
) -> None:
    assert admits(used, size, limit) is fits


async def test_reserving_waits_until_room_is_given_back() -> None:
    budget = ByteBudget(10 * KB)
    first = await budget.reserve(8 * KB)
    second = asyncio.create_task(budget.reserve(4 * KB))
    await asyncio.sleep(0)
    assert (second.done(), budget.waiting) == (False, 1)
    first.release()
    assert (await second).size_bytes == 4 * KB
    assert budget.used_bytes == 4 * KB


async def test_waiting_reservations_are_served_in_order() -> None:
    """A small one does not pass a large one for ever."""
    budget = ByteBudget(10 * KB)
    first, second = await budget.reserve(6 * KB), await budget.reserve(3 * KB)
    large = asyncio.create_task(budget.reserve(9 * KB))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert not small.done()
    first.release()
    await asyncio.sleep(0)
    assert not large.done()
    second.release()
    await large
    await small


async def test_a_reservation_larger_than_the_budget_passes_alone() -> None:
    budget = ByteBudget(10 * KB)
    first = await budget.reserve(KB)
    huge = asyncio.create_task(budget.reserve(100 * KB))
    await asyncio.sleep(0)
    assert not huge.done()
    first.release()
    hold = await huge
    after = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert not after.done()
    hold.release()
    await after


async def test_releasing_twice_gives_back_once() -> None:
    budget = ByteBudget(10 * KB)
    hold = await budget.reserve(2 * KB)
    await budget.reserve(KB)
    hold.release()
    hold.release()
    assert budget.used_bytes == KB


async def test_a_hold_grows_without_waiting_and_shrinks_for_others() -> None:
    budget = ByteBudget(10 * KB)
    hold = await budget.reserve(KB)
    hold.resize(20 * KB)
    assert budget.used_bytes == 20 * KB
    other = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert not other.done()
    hold.resize(2 * KB)
    await other
    assert budget.peak_bytes == 20 * KB


async def test_a_cancelled_reservation_leaves_the_queue() -> None:
    budget = ByteBudget(10 * KB)
    first = await budget.reserve(10 * KB)
    gone = asyncio.create_task(budget.reserve(9 * KB))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    first.release()
    assert (budget.waiting, budget.used_bytes) == (0, 0)


async def test_a_reservation_cancelled_when_admitted_is_released() -> None:
    budget = ByteBudget(10 * KB)
    first = await budget.reserve(10 * KB)
    gone = asyncio.create_task(budget.reserve(9 * KB))
    await asyncio.sleep(0)
    first.release()  # admits it; it has not run yet
    assert budget.used_bytes == 9 * KB
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert budget.used_bytes == 0


async def test_a_failed_budget_raises_for_waiting_and_later_reservations() -> None:
    budget = ByteBudget(KB)
    await budget.reserve(KB)
    waiting = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    budget.fail(RuntimeError("the disk is full"))
    for reserving in (waiting, budget.reserve(1)):
        with pytest.raises(RuntimeError, match="the disk is full"):
            await reserving


async def test_room_given_back_by_other_threads_never_exceeds_the_limit() -> None:
    budget = ByteBudget(64 * KB)

    async def one(size: int) -> None:
        hold = await budget.reserve(size)
        thread = threading.Thread(target=hold.release)
        thread.start()
        await asyncio.to_thread(thread.join)

    await asyncio.gather(*(one(KB * (1 + i % 20)) for i in range(200)))
    assert budget.used_bytes == 0
    assert budget.peak_bytes <= budget.limit_bytes


async def test_an_empty_reservation_takes_the_least_size() -> None:
    """So that the number of tiny things is bounded, too."""
    assert (await ByteBudget(KB).reserve(0)).size_bytes == LEAST_BYTES


async def test_a_budget_grows_when_it_was_too_small() -> None:
    budget = ByteBudget(8 * KB, first_bytes=KB)
    first = await budget.reserve(KB)
    waiting = asyncio.create_task(budget.reserve(KB))
    await asyncio.sleep(0)
    assert budget.waiting == 1  # there is work: more room would be a longer queue
    first.release()
    (await waiting).release()
    budget.idle()
    budget.busy()
    holds = [await budget.reserve(KB) for _ in range(2)]
    assert budget.is_full(1)  # twice the room
    budget.idle()
    budget.busy()
    assert budget.is_full(1)  # nobody has waited since
    for hold in holds:
        hold.release()


async def test_a_budget_that_was_large_enough_does_not_grow() -> None:
    budget = ByteBudget(8 * KB, first_bytes=KB)
    for _ in range(5):
        (await budget.reserve(KB)).release()
        budget.idle()
        budget.busy()
    await budget.reserve(KB)
    assert budget.is_full(KB)


@pytest.mark.parametrize("idle_before", [False, True])
async def test_an_idle_budget_keeps_no_room_back(idle_before: bool) -> None:
    """Whoever reserves much ahead would wait for ever. And never beyond the limit."""
    budget = ByteBudget(7 * KB, first_bytes=KB)
    if idle_before:
        budget.idle()
    reserving = [asyncio.create_task(budget.reserve(KB)) for _ in range(9)]
    await asyncio.sleep(0)
    if not idle_before:
        assert budget.waiting == 8
        budget.idle()
    holds = await asyncio.gather(*reserving[:7])
    assert (budget.waiting, budget.used_bytes) == (2, 7 * KB)
    for hold in holds:
        hold.release()
    await asyncio.gather(*reserving[7:])


async def test_the_first_size_never_exceeds_the_limit() -> None:
    budget = ByteBudget(KB, first_bytes=8 * KB)
    await budget.reserve(KB)
    assert budget.is_full(1)
