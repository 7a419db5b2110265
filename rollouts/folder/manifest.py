# SPDX-License-Identifier: Apache-2.0
"""The manifest: an append-only log that says which episodes of a folder exist.

    write partial files ─▶ fsync ─▶ append a record (fsync) ─▶ rename ─▶ …  ─▶ compact
                                          │
                 before it a crash discards the episodes; after it the next start finishes renaming

An episode exists from the moment its record is on the medium, and its files are on the medium
before that. Each line is one record; the first is `schema`:

    checkpoint    how far the growing part's files are durable, and the episodes added to it
    parts         finished parts, in one record where they exist together or not at all

What can go wrong: a crash leaves half a record, which readers ignore and the next start drops. A
failed append is truncated. A reader beside a writer reads the file in one go, so that it has the
old content or the new when the log is compacted, which replaces the file. That happens at the start
and the end of a rollout. `docs/decisions/0018` compares the log with an index in SQLite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..errors import OutputDamaged
from .disk import Disk, typed
from .layout import MANIFEST, SCHEMA, Part

_FIRST_FORMAT = "manifest.json"  # until version 1 of the schema


class Checkpoint(msgspec.Struct, frozen=True):
    """How far the growing part is durable."""

    part: int
    sizes: dict[str, int]  # bytes of each kind of file
    episode_ids: tuple[str, ...]  # all of the part so far
    steps: int


class _Record(msgspec.Struct):
    """A line but the first."""

    parts: tuple[Part, ...] = ()
    checkpoint: Checkpoint | None = None


_decode = msgspec.json.Decoder(_Record).decode


@dataclass
class Known:
    """All parts and episodes that exist."""

    parts: dict[int, Part] = field(default_factory=dict)
    growing: Checkpoint | None = None

    @property
    def next_number(self) -> int:
        """The number of the next part."""
        numbers = [*self.parts, self.growing.part if self.growing else -1, -1]
        return max(numbers) + 1

    def episode_ids(self) -> set[str]:
        """The ids of all finished episodes."""
        found = {i for part in self.parts.values() for i in part.episode_ids}
        return found | set(self.growing.episode_ids if self.growing else ())

    def add(self, part: Part) -> None:
        """Adds a finished part, which may have been the growing one."""
        self.parts[part.number] = part
        if self.growing is not None and self.growing.part == part.number:
            self.growing = None

    def grow(self, checkpoint: Checkpoint) -> None:
        """Adds the episodes of a checkpoint to the growing part."""
        before = self.growing.episode_ids if self.growing is not None else ()
        ids = (*before, *checkpoint.episode_ids)
        self.growing = msgspec.structs.replace(checkpoint, episode_ids=ids)


class Manifest:
    """The log of an open folder, and what it says. Used by the writer's thread alone."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.known = read(folder)
        self._path = folder / MANIFEST
        self._disk = disk
        self.compact()

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Records how far the growing part is durable, with the episodes since the last time."""
        self._append({"checkpoint": checkpoint})
        self.known.grow(checkpoint)

    def add(self, parts: Sequence[Part]) -> None:
        """Records finished parts, all of them or, after a crash, none."""
        self._append({"parts": parts})
        for part in parts:
            self.known.add(part)

    def compact(self) -> None:
        """Replaces the log by one with a record per part."""
        parts, growing = self.known.parts, self.known.growing
        records: list[dict[str, Any]] = [{"schema": SCHEMA}]
        records += [{"parts": [parts[number]]} for number in sorted(parts)]
        if growing is not None:
            records.append({"checkpoint": growing})
        content = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        self._disk.write_atomically(self._path, content)
        self._size_bytes = len(content)

    def _append(self, record: Mapping[str, Any]) -> None:
        line = msgspec.json.encode(record) + b"\n"
        try:
            self._disk.append(self._path, [line])
            self._disk.sync(self._path)
        except Exception:
            self._disk.truncate(self._path, self._size_bytes)  # no half a record before the next
            raise
        self._size_bytes += len(line)


def exists(folder: Path) -> bool:
    """Whether the folder has rollouts, also of an earlier version."""
    return (folder / MANIFEST).exists() or (folder / _FIRST_FORMAT).exists()


def read(folder: Path) -> Known:
    """Returns what exists in a folder, and changes nothing."""
    path = folder / MANIFEST
    if (folder / _FIRST_FORMAT).exists():
        raise OutputDamaged(
            f"{folder} was written by an earlier version of openenvd, which had {_FIRST_FORMAT}",
            "collect into another folder, and read this one with the version that wrote it",
        )
    known = Known()
    if not path.exists():
        return known
    with typed(path):
        content = path.read_bytes()
    try:
        first, *lines = content[: content.rfind(b"\n") + 1].splitlines()
        schema = msgspec.json.decode(first)["schema"]
        if schema != SCHEMA:
            told = f"{path} has the schema {schema!r}, this version reads {SCHEMA!r}"
            raise OutputDamaged(told)
        for record in map(_decode, lines):
            for part in record.parts:
                known.add(part)
            if record.checkpoint is not None:
                known.grow(record.checkpoint)
    except (ValueError, KeyError, TypeError) as exc:
        raise OutputDamaged(f"{path} is not a manifest of rollouts: {exc}") from exc
    return known
