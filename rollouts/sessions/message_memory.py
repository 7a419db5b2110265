# SPDX-License-Identifier: Apache-2.0
"""A pool of memory for large messages, whose pages are reused.

A fresh block of a megabyte costs 0.45 ms of page faults before anything lies in it, and used pages
cost 0.02 ms: where each message took fresh memory, and each copy of it again, that was nine tenths
of what the loop did. So a message is received into a block, only views of it go to the disk, and
the block is reused when the last view is gone.

    take ─▶ view ─▶ received into ─▶ views of it: observation, rows to write ─▶ none left: free

Blocks are not released explicitly. Each view refers to its block, so a block to which only the pool
refers is free. A view that a policy keeps for ever keeps its block, and costs nothing else.

Blocks are of certain sizes, eight to each doubling: at most an eighth lies idle, and that is not
even resident unless a longer message was there before. They are mapped, not allocated, so that they
do not tear holes into the C library's heap; privately, so that a process that was forked keeps what
it saw, and neighbours count as one mapping, of which there are 65,530. The loop's thread alone
takes; any thread may drop views.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
from collections import defaultdict, deque

LOOKS = 64  # at blocks that were taken longest ago, before another one is made
LOOKS_WHEN_SHORT = 512  # also at those of other sizes, which may go: 0.1 ms, however many there are
RELEASED_AT_ONCE_BYTES = 8 << 20  # in an iteration of the loop: 1 ms
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_STEPS_OF_A_DOUBLING = 3  # as a power of two
_LEAST_STEP = 12  # a page, as a power of two
_OF_THE_POOL = 2  # references: the pool's, and that of asking


class MessageMemory:
    """Blocks of about `limit_bytes`; beyond it, free ones are released for new ones."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)  # as they were taken
        self.size_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Returns memory for a message of this size, with arbitrary content."""
        capacity = block_bytes(size_bytes)
        blocks = self._blocks[capacity]
        is_short = self.size_bytes + capacity > self._limit_bytes
        if not _bring_a_free_one_last(blocks, LOOKS_WHEN_SHORT if is_short else LOOKS):
            if is_short:
                self._release_free_blocks(max(capacity, RELEASED_AT_ONCE_BYTES))
            blocks.append(mmap.mmap(-1, capacity, flags=_PRIVATE))
            self.size_bytes += capacity
        return memoryview(blocks[-1])[:size_bytes]

    async def release_all(self) -> None:
        """Releases all blocks, a few in each iteration of the loop.

        A block that is in use is unmapped with its last view.
        """
        gone_bytes = 0
        for capacity, blocks in self._blocks.items():
            while blocks:
                blocks.pop()
                gone_bytes += capacity
                if gone_bytes >= RELEASED_AT_ONCE_BYTES:
                    gone_bytes = 0
                    await asyncio.sleep(0)
        self.size_bytes = 0

    def _release_free_blocks(self, wanted_bytes: int) -> None:
        """Releases about `wanted_bytes`, as far as a bounded search finds free blocks."""
        looks = LOOKS_WHEN_SHORT
        for capacity in list(self._blocks):
            blocks = self._blocks[capacity] = self._blocks.pop(capacity)  # the next time, the last
            for _ in range(min(looks, len(blocks))):
                looks -= 1
                if _bring_a_free_one_last(blocks, 1):
                    blocks.pop()
                    self.size_bytes -= capacity
                    wanted_bytes -= capacity
                if wanted_bytes <= 0:
                    return


def block_bytes(size_bytes: int) -> int:
    """The size of the block that a message of this size gets."""
    step = 1 << max(_LEAST_STEP, size_bytes.bit_length() - 1 - _STEPS_OF_A_DOUBLING)
    return -(-size_bytes // step) * step


def _bring_a_free_one_last(blocks: deque[mmap.mmap], looks: int) -> bool:
    for _ in range(min(looks, len(blocks))):
        blocks.rotate(-1)
        if _is_free(blocks):
            return True
    return False


def _is_free(blocks: deque[mmap.mmap]) -> bool:
    """Whether only the pool refers to the last block."""
    return sys.getrefcount(blocks[-1]) == _OF_THE_POOL
