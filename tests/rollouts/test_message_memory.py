# SPDX-License-Identifier: Apache-2.0
"""Blocks for messages: taken again when nobody looks at them, and not before."""

from __future__ import annotations

import threading

import pytest

from openenvd.rollouts.message_memory import MessageMemory, block_bytes

SIZE = 100_000
ENOUGH = 1 << 30


def filled(memory: MessageMemory, byte: int, size_bytes: int = SIZE) -> memoryview:
    view = memory.take(size_bytes)
    view[:] = bytes([byte]) * size_bytes
    return view


def test_a_block_that_nobody_looks_at_is_taken_again() -> None:
    memory = MessageMemory(ENOUGH)
    for byte in range(100):
        filled(memory, byte)
    assert memory.size_bytes == block_bytes(SIZE)


def test_a_block_is_left_alone_for_as_long_as_any_part_of_it_is_looked_at() -> None:
    memory = MessageMemory(ENOUGH)
    parts = [filled(memory, byte)[10:20][2:4] for byte in range(50)]
    for byte in range(50, 200):
        filled(memory, byte)
    assert [bytes(part) for part in parts] == [bytes([byte]) * 2 for byte in range(50)]
    assert memory.size_bytes == 51 * block_bytes(SIZE)


def test_views_may_be_dropped_by_any_thread() -> None:
    memory = MessageMemory(ENOUGH)
    views = [filled(memory, byte) for byte in range(20)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    again = [filled(memory, byte) for byte in range(20)]
    assert len(again) * block_bytes(SIZE) == memory.size_bytes


def test_beyond_the_limit_idle_blocks_give_way_to_those_that_are_needed() -> None:
    memory = MessageMemory(10 * block_bytes(SIZE))
    idle = [filled(memory, 0) for _ in range(10)]
    idle.clear()
    held = [filled(memory, byte, 2 * SIZE) for byte in range(4)]
    assert memory.size_bytes == 4 * block_bytes(2 * SIZE)
    assert [view[0] for view in held] == [0, 1, 2, 3]


def test_what_is_looked_at_is_never_refused() -> None:
    memory = MessageMemory(block_bytes(SIZE))
    held = [filled(memory, byte) for byte in range(5)]
    assert [view[-1] for view in held] == [0, 1, 2, 3, 4]


async def test_what_is_looked_at_survives_the_end() -> None:
    memory = MessageMemory(ENOUGH)
    view = filled(memory, 7)
    for _ in range(20):
        filled(memory, 1, 4 << 20)
    await memory.let_go()
    assert memory.size_bytes == 0
    assert bytes(view) == b"\7" * SIZE


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 65_536, 100_000, 1_000_100, 99_999_999])
def test_a_block_is_large_enough_and_at_most_an_eighth_larger(size_bytes: int) -> None:
    assert size_bytes <= block_bytes(size_bytes) <= max(4096, size_bytes * 9 / 8 + 4096)
