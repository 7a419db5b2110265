# SPDX-License-Identifier: Apache-2.0
"""Appends to large files past the page cache: straight from memory of ours to the medium.

    chunks ─gathered─▶ one block of memory, used again ─O_DIRECT─▶ medium

A medium takes whole blocks, from memory that begins where a block may. What comes before the first
whole block of an append, and what comes after the last, goes through the cache as everything else
does, into pages that the blocks between never touch; the kernel keeps both in order, and `fsync`
makes both certain.

Not every file system can, and some say so only when something is written. Then this goes through
the cache, too, and nothing is tried again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

from ..episodes import BytesLike

BLOCK_BYTES = 4096  # of most media and of most caches; others refuse
GATHERED_BYTES = 1 << 20
LEAST_BYTES = 64 << 10  # of whole blocks: less is not worth the calls
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process has its own

Write = Callable[[int, Sequence[BytesLike]], None]


class PastCache:
    """Of one thread: the memory serves one append after the other."""

    def __init__(self) -> None:
        self._gathered = memoryview(mmap.mmap(-1, GATHERED_BYTES, flags=_PRIVATE))
        self._can = bool(DIRECT)

    def append(self, descriptor: int, chunks: Sequence[BytesLike], write: Write) -> bool:
        """All of it, with `write`, to a file that nobody else writes; whether it went past."""
        pieces = _Pieces(chunks)
        size_bytes = os.fstat(descriptor).st_size
        before_bytes = min(-size_bytes % BLOCK_BYTES, pieces.left_bytes)
        block_bytes = (pieces.left_bytes - before_bytes) // BLOCK_BYTES * BLOCK_BYTES
        if not self._can or block_bytes < LEAST_BYTES:
            write(descriptor, chunks)
            return False
        if before_bytes:
            write(descriptor, pieces.take(before_bytes))
        self._can = _set_direct(descriptor, True)
        self._append_blocks(descriptor, pieces, block_bytes, write)
        _set_direct(descriptor, False)
        if pieces.left_bytes:
            write(descriptor, pieces.take(pieces.left_bytes))
        return self._can

    def _append_blocks(
        self, descriptor: int, pieces: _Pieces, size_bytes: int, write: Write
    ) -> None:
        while size_bytes:
            blocks = self._gather(pieces.take(min(size_bytes, GATHERED_BYTES)))
            size_bytes -= len(blocks)
            was_bytes = os.fstat(descriptor).st_size
            try:
                write(descriptor, [blocks])
            except OSError as exc:
                if exc.errno not in REFUSED or not self._can:
                    raise
                self._can = _set_direct(descriptor, False)
                write(descriptor, [blocks[os.fstat(descriptor).st_size - was_bytes :]])

    def _gather(self, views: Sequence[memoryview]) -> memoryview:
        at = 0
        for view in views:
            self._gathered[at : at + len(view)] = view
            at += len(view)
        return self._gathered[:at]


class _Pieces:
    """Chunks, to be taken from the front by the byte."""

    def __init__(self, chunks: Sequence[BytesLike]) -> None:
        self._views = [memoryview(chunk).cast("B") for chunk in reversed(chunks) if len(chunk)]
        self.left_bytes = sum(map(len, self._views))

    def take(self, size_bytes: int) -> list[memoryview]:
        self.left_bytes -= size_bytes
        taken = []
        while size_bytes:
            view = self._views.pop()
            if len(view) > size_bytes:
                self._views.append(view[size_bytes:])
                view = view[:size_bytes]
            taken.append(view)
            size_bytes -= len(view)
        return taken


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Whether it is so now."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | DIRECT if wanted else flags & ~DIRECT)
    except OSError as exc:
        if exc.errno not in REFUSED:
            raise
        return False
    return wanted
