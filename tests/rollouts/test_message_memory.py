# SPDX-License-Identifier: Apache-2.0
"""Blocks for messages: taken again when nobody looks at them, and not before."""

from __future__ import annotations

import itertools
import os
import threading

import pytest

from openenvd.rollouts.sessions import message_memory
from openenvd.rollouts.sessions.message_memory import (
    LOOKS_WHEN_SHORT,
    RELEASED_AT_ONCE_BYTES,
    MessageMemory,
    block_bytes,
)

SIZE = 100_000
ENOUGH = 1 << 30


def filled(memory: MessageMemory, byte: int, size_bytes: int = SIZE) -> memoryview:
    view = memory.take(size_bytes)
    view[:] = bytes([byte]) * size_bytes
    return view


def test_a_block_without_views_is_reused() -> None:
    memory = MessageMemory(ENOUGH)
    for byte in range(100):
        filled(memory, byte)
    assert memory.size_bytes == block_bytes(SIZE)


def test_a_block_is_not_reused_while_a_view_of_it_exists() -> None:
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


def test_free_blocks_are_released_for_new_ones_beyond_the_limit() -> None:
    memory = MessageMemory(10 * block_bytes(SIZE))
    idle = [filled(memory, 0) for _ in range(10)]
    idle.clear()
    held = [filled(memory, byte, 2 * SIZE) for byte in range(4)]
    assert memory.size_bytes == 4 * block_bytes(2 * SIZE)
    assert [view[0] for view in held] == [0, 1, 2, 3]


def test_free_blocks_are_released_a_few_at_a_time() -> None:
    """A gigabyte held the loop for a quarter of a second."""
    memory = MessageMemory(64 << 20)
    idle = [filled(memory, 0, 1 << 20) for _ in range(64)]
    idle.clear()
    for number in range(1, 11):
        filled(memory, 1, (1 << 20) + (number << 17))
    assert (64 << 20) - 2 * RELEASED_AT_ONCE_BYTES <= memory.size_bytes <= 64 << 20


def test_the_search_for_a_free_block_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at all of them for each message held the loop for longer with every one."""
    memory = MessageMemory(block_bytes(SIZE))
    held = [memory.take(size) for size in [SIZE, 2 * SIZE, 3 * SIZE] * (2 * LOOKS_WHEN_SHORT)]
    looks = itertools.count()
    monkeypatch.setattr(message_memory, "_is_free", lambda blocks: next(looks) < 0)
    held.append(memory.take(SIZE))
    assert next(looks) <= 2 * LOOKS_WHEN_SHORT


def test_blocks_that_become_free_beyond_the_limit_are_released() -> None:
    memory = MessageMemory(block_bytes(SIZE))
    held = [memory.take(SIZE) for _ in range(4 * LOOKS_WHEN_SHORT)]
    held.clear()
    most_bytes = memory.size_bytes
    for number in range(1, 41):
        memory.take(SIZE + (number << 17))
    assert memory.size_bytes < most_bytes / 3


def test_a_forked_process_keeps_the_content_of_its_blocks() -> None:
    memory = MessageMemory(ENOUGH)
    view = filled(memory, 1)
    asked, ask = os.pipe()
    if (child := os.fork()) == 0:
        os.read(asked, 1)
        os._exit(view[0])
    view.release()
    filled(memory, 2)
    os.write(ask, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    os.close(asked)
    os.close(ask)


def test_memory_is_handed_out_even_when_all_blocks_are_in_use() -> None:
    memory = MessageMemory(block_bytes(SIZE))
    held = [filled(memory, byte) for byte in range(5)]
    assert [view[-1] for view in held] == [0, 1, 2, 3, 4]


async def test_views_survive_the_release_of_all_blocks() -> None:
    memory = MessageMemory(ENOUGH)
    view = filled(memory, 7)
    for _ in range(20):
        filled(memory, 1, 4 << 20)
    await memory.release_all()
    assert memory.size_bytes == 0
    assert bytes(view) == b"\7" * SIZE


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 65_536, 100_000, 1_000_100, 99_999_999])
def test_a_block_is_large_enough_and_at_most_an_eighth_larger(size_bytes: int) -> None:
    assert size_bytes <= block_bytes(size_bytes) <= max(4096, size_bytes * 9 / 8 + 4096)
