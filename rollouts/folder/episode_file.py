# SPDX-License-Identifier: Apache-2.0
"""The file of an episode until it is renamed: its beginning on disk, its end in memory.

The event loop adds lines; one thread at a time writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..episodes import BytesLike, Episode, Step
from .disk import Disk
from .rows import Verdict, checksum, end_row, last_row, step_row

JOIN_BYTES = 32 << 10  # the line of a smaller step is made at once, as one object in memory
LARGE_BYTES = 4 << 20  # of an episode whose file does not stay in the page cache
_LIKELY_BYTES = 512 << 10  # of what is written at a time: more will come

Row = list[BytesLike]


class EpisodeFile:
    """The lines of one attempt at an episode."""

    def __init__(self, episode_id: str, path: Path) -> None:
        self.episode_id = episode_id
        self.path = path
        self.steps = 0
        self.fault: str | None = None  # why it cannot be finished
        self.size_bytes = 0  # on disk
        self.pending_bytes = 0  # in memory
        self._pending: list[Row | Callable[[], Row]] = []  # large rows are made when written
        self._last_bytes = 0  # of the line with the last observation
        self._digest = hashlib.sha256()

    def add(self, number: int, step: Step) -> None:
        """Adds the next step. One that does not follow the last makes the episode unusable."""
        if number != self.steps and self.fault is None:
            self.fault = f"step {number} came after {self.steps} steps"
        size_bytes = step.size_bytes
        if size_bytes < JOIN_BYTES:
            row = b"".join(step_row(self.episode_id, number, step))
            self._pending.append([row])
            self.pending_bytes += len(row)
        else:
            self._pending.append(partial(step_row, self.episode_id, number, step))
            self.pending_bytes += size_bytes
        self.steps += 1

    def add_last(self, observation_json: BytesLike) -> None:
        """Adds what was observed after the last step."""
        row = last_row(self.episode_id, self.steps, observation_json)
        self._last_bytes = sum(map(len, row))
        self._pending.append(row)
        self.pending_bytes += self._last_bytes

    def add_end(self, episode: Episode, verdict: Verdict) -> None:
        """Adds the last lines of an episode."""
        if not self._last_bytes and verdict.filtered is None:
            self.add_last(episode.final_observation_json)
        end = end_row(episode, self.steps, self._last_bytes, verdict)
        self._pending.append(partial(self._with_checksum, end))
        self.pending_bytes += len(end)

    def write(self, disk: Disk, *, write_back: bool = False) -> None:
        """Appends what is in memory to the file. Blocks."""
        chunks = self._take()
        size_bytes = sum(len(memoryview(chunk).cast("B")) for chunk in chunks)
        is_large = self.size_bytes + size_bytes >= LARGE_BYTES or size_bytes >= _LIKELY_BYTES
        disk.append(self.path, chunks, write_back=write_back or is_large)
        self.size_bytes += size_bytes

    def content(self) -> bytes:
        """All lines of an episode of which nothing is on disk."""
        return b"".join(self._take())

    def _take(self) -> Row:
        rows, self._pending, self.pending_bytes = self._pending, [], 0
        chunks: Row = []
        for row in rows:  # the digest of the lines before is a part of the last one
            made = row() if callable(row) else row
            for chunk in made:
                self._digest.update(chunk)
            chunks += made
        return chunks

    def _with_checksum(self, end: bytes) -> Row:
        self._digest.update(end)
        return [end, checksum(self._digest.hexdigest())]
