# SPDX-License-Identifier: Apache-2.0
"""Parts: the growing one, to which finished episodes are appended, and finished ones.

The files have temporary names here. `sync` makes them durable; then the manifest records them, and
`publish` renames them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..episodes import BytesLike, Episode
from .disk import Disk, digest_of
from .layout import (
    ARRAYS,
    EPISODES,
    KINDS,
    STEPS,
    Block,
    Part,
    PartFile,
    Verdict,
    episode_row,
    file_name,
    padding,
    partial,
)
from .spool import OWN_PART_BYTES, Spool, Stream


class PartialFile:
    """A file of an unfinished part, and the checksum of what was appended."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self.size_bytes = 0
        self._digest = hashlib.sha256()

    @classmethod
    def adopt(cls, stream: Stream, path: Path, disk: Disk) -> PartialFile:
        """Makes an episode's file the file of a part, without copying it."""
        file = cls(path, disk)
        disk.rename(stream.path, partial(path))
        file.size_bytes, file._digest = stream.on_disk_bytes, stream.digest
        stream.on_disk_bytes = 0  # it is no longer the episode's to forget
        return file

    @classmethod
    def resume(cls, path: Path, size_bytes: int, disk: Disk) -> PartialFile:
        """Truncates a file that a crash left to its durable size."""
        file = cls(path, disk)
        if size_bytes:
            disk.truncate(partial(path), size_bytes)
            file._digest = digest_of(partial(path))
            file.size_bytes = size_bytes
        return file

    def append(self, chunks: Sequence[BytesLike]) -> None:
        """Appends chunks; where there are none, no file is created."""
        if not chunks:
            return
        self._disk.append(partial(self.path), chunks)
        for chunk in chunks:
            self._digest.update(chunk)
            self.size_bytes += len(memoryview(chunk).cast("B"))

    def finished(self) -> PartFile:
        """The manifest's entry."""
        return PartFile(self.path.name, self.size_bytes, self._digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Mark:
    """A point at which all episodes of a part are whole."""

    sizes: Mapping[str, int]  # of each kind of file
    episodes: int
    steps: int


class OpenPart:
    """A part that is being written."""

    def __init__(self, folder: Path, number: int, disk: Disk) -> None:
        self.number = number
        self.episode_ids: list[str] = []
        self.steps = 0
        self._folder = folder
        self._disk = disk
        self.files = {kind: PartialFile(self._path(kind), disk) for kind in KINDS}

    @classmethod
    def resume(
        cls, folder: Path, number: int, sizes: Mapping[str, int], ids: Sequence[str], disk: Disk
    ) -> OpenPart:
        """Opens a growing part again, as far as it is durable."""
        part = cls(folder, number, disk)
        part.files = {k: PartialFile.resume(part._path(k), sizes[k], disk) for k in KINDS}
        part.episode_ids = list(ids)
        return part

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Of each kind of file."""
        return {kind: file.size_bytes for kind, file in self.files.items()}

    @property
    def mark(self) -> Mark:
        """The present end of the part."""
        return Mark(self.sizes, len(self.episode_ids), self.steps)

    def add(self, spool: Spool, episode: Episode, verdict: Verdict) -> None:
        """Copies a finished episode to the end."""
        arrays = self.files[ARRAYS]
        if spool.arrays.size_bytes:
            arrays.append([bytes(padding(arrays.size_bytes))])
        block = self._block(spool)
        for chunks in spool.rows.content():
            self.files[STEPS].append(chunks)
        for chunks in spool.arrays.content():
            arrays.append(chunks)
        self._note(episode, block, verdict)

    def adopt(self, spool: Spool, episode: Episode, verdict: Verdict) -> None:
        """Makes the files of a finished episode, all on disk, those of this part."""
        block = self._block(spool)
        for kind, stream in ((STEPS, spool.rows), (ARRAYS, spool.arrays)):
            if stream.size_bytes:
                self.files[kind] = PartialFile.adopt(stream, self._path(kind), self._disk)
        self._note(episode, block, verdict)

    def sync(self) -> None:
        """Makes the content of the files durable; their names are so when the folder is synced."""
        for file in self._written():
            self._disk.sync(partial(file.path), drop_cached=file.size_bytes >= OWN_PART_BYTES)

    def finished(self) -> Part:
        """The manifest's entry."""
        files = tuple(file.finished() for file in self._written())
        return Part(self.number, files, tuple(self.episode_ids), self.steps)

    def cut(self, mark: Mark) -> None:
        """Truncates the files to a mark at which all episodes were whole."""
        del self.episode_ids[mark.episodes :]
        self.steps = mark.steps
        for kind, file in self.files.items():
            file.size_bytes = mark.sizes[kind]
            if partial(file.path).exists():
                self._disk.truncate(partial(file.path), mark.sizes[kind])

    def forget(self, *, but: Part) -> None:
        """Removes partial files that are not among those of the finished part."""
        for file in self._written():
            if file.path.name not in {kept.name for kept in but.files}:
                partial(file.path).unlink(missing_ok=True)

    def _block(self, spool: Spool) -> Block:
        """The position of the next episode."""
        return Block(
            part=self.number,
            first_row=self.steps,
            steps=spool.steps,
            steps_offset=self.files[STEPS].size_bytes,
            steps_bytes=spool.rows.size_bytes,
            arrays_offset=self.files[ARRAYS].size_bytes,
            arrays_bytes=spool.arrays.size_bytes,
        )

    def _note(self, episode: Episode, block: Block, verdict: Verdict) -> None:
        self.files[EPISODES].append(episode_row(episode, block, verdict))
        self.episode_ids.append(episode.id)
        self.steps += block.steps

    def _written(self) -> list[PartialFile]:
        return [file for file in self.files.values() if file.size_bytes]

    def _path(self, kind: str) -> Path:
        return self._folder / file_name(kind, self.number)


def publish(folder: Path, part: Part, disk: Disk) -> None:
    """Renames the files of a recorded part; some may have been renamed before a crash."""
    for file in part.files:
        path = folder / file.name
        if partial(path).exists():
            disk.rename(partial(path), path)
