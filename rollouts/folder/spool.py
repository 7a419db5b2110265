# SPDX-License-Identifier: Apache-2.0
"""The spool: steps of unfinished episodes, which no reader sees.

Small episodes wait in memory. Large ones, and those beyond the allowance of all together, go to
`spool/`, which the next start empties after a crash. A finished episode is copied into the growing
part, or, where it is large, its files become a part as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..episodes import Array, BytesLike, Step
from .disk import Disk, blocks
from .layout import ARRAYS, STEPS, array_row, padding, step_row

JOIN_BYTES = 32 << 10  # a smaller row is one object in memory instead of seven
LARGE_BYTES = 256 << 10  # an episode never has more in memory
OWN_PART_BYTES = 4 << 20  # of an episode whose files become a part: they are not cached
LIKELY_BYTES = 512 << 10  # of a step: eight of them are a part
_ZEROS = bytes(64)


def to_spill(in_memory: Iterable[tuple[str, int]], allowance_bytes: int) -> list[str]:
    """Which episodes go to the disk: the large ones, and then the largest, until the others fit."""
    ordered = sorted(in_memory, key=lambda one: one[1])
    total_bytes = sum(size for _, size in ordered)
    chosen = []
    while ordered and (ordered[-1][1] >= LARGE_BYTES or total_bytes > allowance_bytes):
        episode_id, size = ordered.pop()
        total_bytes -= size
        chosen.append(episode_id)
    return chosen


@dataclass
class Stream:
    """The bytes of one episode for one file: the beginning on disk, the end in memory."""

    path: Path
    chunks: list[BytesLike] = field(default_factory=list)
    in_memory_bytes: int = 0
    on_disk_bytes: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def size_bytes(self) -> int:
        """All bytes, on disk and in memory."""
        return self.on_disk_bytes + self.in_memory_bytes

    def append(self, chunks: Sequence[BytesLike]) -> None:
        """In memory, for now."""
        self.chunks += chunks
        self.in_memory_bytes += sum(map(_length, chunks))

    def spill(self, disk: Disk, *, drop_cached: bool) -> None:
        """Writes what is in memory to the disk."""
        if not self.chunks:
            return
        disk.append(self.path, self.chunks, drop_cached=drop_cached)
        for chunk in self.chunks:
            self.digest.update(chunk)
        self.on_disk_bytes += self.in_memory_bytes
        self.chunks, self.in_memory_bytes = [], 0

    def content(self) -> Iterator[list[BytesLike]]:
        """Yields all of it, in bounded pieces."""
        if self.on_disk_bytes:
            for block in blocks(self.path):
                yield [block]
        yield self.chunks

    def forget(self) -> None:
        """Removes the file."""
        if self.on_disk_bytes:
            self.path.unlink(missing_ok=True)


@dataclass
class Spool:
    """The steps of one unfinished episode."""

    episode_id: str
    rows: Stream
    arrays: Stream
    steps: int = 0
    fault: str | None = None  # why it cannot be finished

    @classmethod
    def begin(cls, episode_id: str, folder: Path, number: int) -> Spool:
        """Makes a spool whose files are named by a number, since an id may be any text."""
        rows, arrays = folder / f"{number}.{STEPS}", folder / f"{number}.{ARRAYS}"
        return cls(episode_id, Stream(rows), Stream(arrays))

    @property
    def in_memory_bytes(self) -> int:
        """The bytes that are not on disk."""
        return self.rows.in_memory_bytes + self.arrays.in_memory_bytes

    @property
    def size_bytes(self) -> int:
        """All bytes, on disk and in memory."""
        return self.rows.size_bytes + self.arrays.size_bytes

    def add(self, number: int, step: Step) -> None:
        """Adds the next step. One that does not follow the last makes the episode unusable."""
        if number != self.steps and self.fault is None:
            self.fault = f"step {number} came after {self.steps} steps"
        rows = [self._add_array(name, array) for name, array in step.arrays.items()]
        row = step_row(self.episode_id, number, step, rows)
        small = step.size_bytes < JOIN_BYTES
        self.rows.append([b"".join(row)] if small else row)
        self.steps += 1

    def _add_array(self, name: str, array: Array) -> dict[str, object]:
        self.arrays.append([_ZEROS[: padding(self.arrays.size_bytes)]])
        row = array_row(name, array, self.arrays.size_bytes)
        self.arrays.append([memoryview(array.data).cast("B")])
        return row

    def spill(self, disk: Disk) -> None:
        """Writes what is in memory to the spool.

        An episode that will be copied into a part stays in the page cache until then.
        """
        drop_cached = self.size_bytes >= OWN_PART_BYTES or self.in_memory_bytes >= LIKELY_BYTES
        self.rows.spill(disk, drop_cached=drop_cached)
        self.arrays.spill(disk, drop_cached=drop_cached)

    def forget(self) -> None:
        """Removes the files."""
        self.rows.forget()
        self.arrays.forget()


def _length(chunk: BytesLike) -> int:
    return chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)
