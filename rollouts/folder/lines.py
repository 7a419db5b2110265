# SPDX-License-Identifier: Apache-2.0
r"""The lines of a stretch of a file, one in memory at a time.

    file ─readinto─▶ one buffer, used again ─find(b"\n")─▶ a line's own bytes

`readline` takes fresh memory for pieces of 8 kB, joins them, and spends its time on page faults.
Here a line is copied once, so that a kept line keeps no other memory.
"""

from __future__ import annotations

from collections.abc import Generator
from io import FileIO

from .disk import drop_from_page_cache

DROPPED_BYTES = 4 << 20  # read bytes that are dropped from the page cache at a time
READ_AHEAD_BYTES = 8 << 20  # more than a kernel has read ahead of us
BLOCK_BYTES = 256 << 10  # of the buffer; it grows for a longer line alone


def lines(
    file: FileIO,
    offset: int,
    size_bytes: int,
    *,
    keep_cached: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> Generator[bytes]:
    """Yields the lines of a stretch of a file, without their line ends.

    Where the file ends before the stretch does, there are fewer. Unless `keep_cached`, the pages
    that were read are dropped from the page cache, also where the caller stops in the middle.
    """
    file.seek(offset)
    buffer = bytearray(min(block_bytes, size_bytes))
    read_bytes = 0
    kept = 0  # of a line whose end is yet to come
    try:
        while got := file.readinto(memoryview(buffer)[kept : kept + size_bytes]):
            size_bytes -= got
            read_bytes += got
            if not keep_cached and read_bytes % DROPPED_BYTES < got:
                drop_from_page_cache(file.fileno(), offset, read_bytes)  # what straddled, too
            view, begin, end = memoryview(buffer), 0, kept + got
            while (stop := buffer.find(b"\n", max(begin, kept), end)) >= 0:
                yield bytes(view[begin:stop])
                begin = stop + 1
            buffer, kept = _with_room(buffer, view[begin:end]), end - begin
    finally:
        if read_bytes and not keep_cached:
            drop_from_page_cache(file.fileno(), offset, read_bytes + READ_AHEAD_BYTES)
    if kept:
        yield bytes(buffer[:kept])


def _with_room(buffer: bytearray, rest: memoryview) -> bytearray:
    """A buffer with the rest at its front, and as much room behind it."""
    if len(rest) * 2 > len(buffer):
        buffer = bytearray(len(buffer) * 2)
    memoryview(buffer)[: len(rest)] = rest
    return buffer
