# SPDX-License-Identifier: Apache-2.0
"""What is known of a folder for certain: the manifest, and the journal of what came since.

A record in the journal is the moment at which something exists. Before it is written, what it
tells of is on the medium under its temporary name; after it, files are renamed. So a crash at any
point leaves either no trace of an episode that a reader would see, or all of it:

    write partial files ─▶ fsync ─▶ record (fsync) ─▶ rename ─▶ …  ─▶ manifest, empty journal
                                          │
                 until here it is discarded; from here on the next start finishes the renaming

Records: `checkpoint`, how far the partial files of the growing part are certain, with the episodes
added since the last one; `parts`, these are finished. A torn last line is what a crash left of a
record; it is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ..errors import OutputDamaged
from .disk import Disk, typed
from .layout import JOURNAL, MANIFEST, SCHEMA, Part


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far the growing part is certain."""

    part: int
    sizes: dict[str, int]  # of each kind of file
    episode_ids: tuple[str, ...]  # all of the part so far
    steps: int


@dataclass
class Known:
    """Everything that exists."""

    parts: dict[int, Part] = field(default_factory=dict)
    growing: Checkpoint | None = None

    @property
    def next_number(self) -> int:
        """Of the part to come."""
        numbers = [*self.parts, self.growing.part if self.growing else -1, -1]
        return max(numbers) + 1

    def episode_ids(self) -> set[str]:
        """All that are finished."""
        found = {i for part in self.parts.values() for i in part.episode_ids}
        return found | set(self.growing.episode_ids if self.growing else ())

    def add(self, part: Part) -> None:
        """Finished; said twice (by the journal and the manifest) is once."""
        self.parts[part.number] = part
        if self.growing is not None and self.growing.part == part.number:
            self.growing = None

    def grow(self, part: int, sizes: Mapping[str, int], ids: list[str], steps: int) -> None:
        """The growing part is certain so far."""
        before = self.growing.episode_ids if self.growing is not None else ()
        if part not in self.parts:
            self.growing = Checkpoint(part, dict(sizes), (*before, *ids), steps)


class Journal:
    """Where records are appended; each is on the medium when `append` returns."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._path = folder / JOURNAL
        self._disk = disk
        self._size_bytes = self._path.stat().st_size if self._path.exists() else 0

    def checkpoint(self, part: int, sizes: Mapping[str, int], ids: list[str], steps: int) -> None:
        """So much of the growing part is certain, with these episodes since the last time."""
        record = {"part": part, "sizes": dict(sizes), "episode_ids": ids, "steps": steps}
        self._append({"kind": "checkpoint", **record})

    def parts(self, parts: Sequence[Part]) -> None:
        """They are finished: one record, so that those which belong together exist together."""
        self._append({"kind": "parts", "parts": [part.to_json() for part in parts]})

    def _append(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        try:
            self._disk.append(self._path, [line])
            self._disk.sync(self._path)
        except Exception:
            if self._path.exists():  # no half a record before the next one
                self._disk.truncate(self._path, self._size_bytes)
            raise
        self._size_bytes += len(line)


def read(folder: Path) -> Known:
    """What exists, from the manifest and the journal. Changes nothing.

    Raises:
        OutputDamaged: one of them cannot be understood.
    """
    known = Known()
    path = folder / MANIFEST
    if path.exists():
        for data in _manifest(path)["parts"]:
            known.add(Part.from_json(data))
    for record in _records(folder / JOURNAL):
        if record["kind"] == "parts":
            for data in record["parts"]:
                known.add(Part.from_json(data))
        elif record["kind"] == "part":  # what earlier versions wrote
            known.add(Part.from_json(record))
        else:
            ids = record["episode_ids"]
            known.grow(record["part"], record["sizes"], ids, record["steps"])
    return known


def write(folder: Path, known: Known, disk: Disk) -> None:
    """The manifest has it all now; the journal begins anew. Only with no part growing."""
    assert known.growing is None
    parts = [known.parts[number].to_json() for number in sorted(known.parts)]
    content = {
        "schema": SCHEMA,
        "episodes": sum(len(part["episode_ids"]) for part in parts),
        "steps": sum(part["steps"] for part in parts),
        "bytes": sum(file["bytes"] for part in parts for file in part["files"]),
        "parts": parts,
    }
    text = orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    disk.write_atomically(folder / MANIFEST, text)
    disk.write_atomically(folder / JOURNAL, b"")


def cut_torn_record(folder: Path, disk: Disk) -> None:
    """What a crash left of the last record of the journal."""
    path = folder / JOURNAL
    if not path.exists():
        return
    content = _content(path)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        disk.truncate(path, whole)
        disk.sync(path)


def _manifest(path: Path) -> Any:
    try:
        content = orjson.loads(_content(path))
        schema = content["schema"]
    except (ValueError, KeyError, TypeError) as exc:
        raise OutputDamaged(f"{path} is no manifest of rollouts: {exc}") from exc
    if schema != SCHEMA:
        raise OutputDamaged(f"{path} has the schema {schema!r}, and this version knows {SCHEMA!r}")
    return content


def _records(path: Path) -> list[Any]:
    """All whole ones."""
    content = _content(path) if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    try:
        return [orjson.loads(line) for line in lines]
    except ValueError as exc:
        raise OutputDamaged(f"{path} has a line that is no record: {exc}") from exc


def _content(path: Path) -> bytes:
    with typed(path):
        return path.read_bytes()
