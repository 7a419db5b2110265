# SPDX-License-Identifier: Apache-2.0
"""Log files, read from the end and followed.

Workers and replicas write their logs by file descriptor, so the daemon does not see the writes: it
looks at the size of a log that somebody follows ten times a second, and at no other.

A log that shrinks (a shim cut it to its bound) is read on from its new end of line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.1
MAX_READ_BYTES = 256 * 1024
TAIL_BLOCK_BYTES = 64 * 1024


class LogFile:
    """One log, read on from `offset`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def read(self, *, final: bool = False) -> str:
        """The whole lines since the last call; with `final`, the unfinished one too."""
        try:
            with self.path.open("rb") as file:
                # Of a file that was cut, from its new end.
                self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
                file.seek(self.offset)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return ""
        if not final and len(data) < MAX_READ_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data.decode("utf-8", "replace")

    def read_lines(self) -> Iterator[str]:
        """Yield the whole lines since the last call, in pieces."""
        while text := self.read():
            yield text

    def read_all(self) -> Iterator[str]:
        """Yield everything up to the end, the unfinished line too, in pieces."""
        while text := self.read(final=True):
            yield text


def offset_of_last_lines(path: Path, count: int, block_bytes: int = TAIL_BLOCK_BYTES) -> int:
    """Find the offset in bytes of the last `count` lines; blocks while it reads them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if count == 0 or size == 0:
                return size
            file.seek(size - 1)
            # The newline that ends the last line does not start another.
            missing = count + 1 if file.read(1) == b"\n" else count
            last_block = (size - 1) // block_bytes * block_bytes
            for start in range(last_block, -1, -block_bytes):
                file.seek(start)
                block = file.read(min(block_bytes, size - start))
                found = block.count(b"\n")
                if found >= missing:
                    return start + _newline_from_the_end(block, missing) + 1
                missing -= found
            return 0
    except FileNotFoundError:
        return 0


def _newline_from_the_end(block: bytes, number: int) -> int:
    index = len(block)
    for _ in range(number):
        index = block.rindex(b"\n", 0, index)
    return index


@contextmanager
def followed(path: Path, wake: asyncio.Event) -> Iterator[None]:
    """Set `wake` whenever a log has another size, until the block ends; on the loop."""
    looking = asyncio.create_task(_look(path, wake), name=f"follow {path.name}")
    try:
        yield
    finally:
        looking.cancel()


async def _look(path: Path, wake: asyncio.Event) -> None:
    before = None
    while True:
        size = _size_of(path)
        if size not in (None, before):
            wake.set()
        before = size
        await asyncio.sleep(LOOK_SECONDS)


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # it is not there yet, or no more
        return path.stat().st_size
    return None
