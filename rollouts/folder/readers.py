# SPDX-License-Identifier: Apache-2.0
"""Reads a folder of rollouts lazily: only the current row is in memory.

    rollouts = open_rollouts("out")
    for episode in rollouts:                 # a row per episode, as it was finished
        for step in episode.steps():         # rows of steps, with their arrays mapped, not copied
            step.arrays["image"].numpy()

All finished episodes are seen, also while a rollout runs or after it was killed:

    manifest ─▶ Rollouts ─▶ a PartReader for each finished part, and the growing one
                                          ├─ JSONL      lines ─▶ LineRow
                                          ├─ columns    ColumnsFile ─▶ ColumnsRow
                                          └─ arrays     mapped

`dataset` and `data_files` are for Hugging Face's `datasets`. What the rows do: `rows`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import OutputDamaged
from . import hugging_face, manifest
from .column_files import MOST_GROUPS, ColumnsFile, ColumnsRow
from .disk import digest_of
from .layout import (
    ARRAYS,
    ARROW,
    EPISODES,
    FORMATS,
    JSONL,
    PARQUET,
    STEPS,
    Part,
    file_name,
    partial,
)
from .lines import lines
from .open_files import Recent, mapped, opened, present, readable
from .rows import LineRow, MappedArray, StepRow
from .spool import OWN_PART_BYTES

MOST_MAPPED = 16  # files of arrays; each has a descriptor


@dataclass(frozen=True)
class EpisodeRow:
    """One episode: `row` has its totals, `steps()` reads the rest."""

    row: Mapping[str, Any]
    _part: PartReader

    @property
    def id(self) -> str:
        """The id of the episode, such as `000042`."""
        return str(self.row["episode_id"])

    def steps(self) -> Iterator[StepRow]:
        """In order."""
        return self._part.steps(self.row)


class Rollouts:
    """A folder of rollouts, as it was when this was made. Can be pickled for other processes."""

    def __init__(self, folder: Path, *, keep_cached: bool = True) -> None:
        self.folder = folder
        known = manifest.read(folder)
        parts = dict(known.parts)
        if known.growing is not None:
            growing = known.growing
            parts[growing.part] = Part(growing.part, (), growing.episode_ids, growing.steps)
        groups, maps = Recent(MOST_GROUPS), Recent(MOST_MAPPED)
        self._readers = [
            PartReader(folder, parts[n], groups, maps, keep_cached) for n in sorted(parts)
        ]

    def __len__(self) -> int:
        return sum(len(reader.part.episode_ids) for reader in self._readers)

    def __iter__(self) -> Iterator[EpisodeRow]:
        for reader in self._readers:
            yield from reader.episodes()

    @property
    def steps(self) -> int:
        """Of all episodes."""
        return sum(reader.part.steps for reader in self._readers)

    def episode_ids(self) -> list[str]:
        """In the order in which `for` gives them."""
        return [i for reader in self._readers for i in reader.part.episode_ids]

    def episode(self, episode_id: str) -> EpisodeRow:
        """The one with that id.

        Raises:
            KeyError: there is none.
        """
        reader, at = self._places[episode_id]
        return reader.episode(at)

    def data_files(self, kind: str = STEPS) -> list[str]:
        """The files of finished parts, which never change again, for `datasets.load_dataset`.

        Args:
            kind: `steps` or `episodes`.
        """
        return [name for form in FORMATS for name in self._files(kind, form)]

    def dataset(self, kind: str = STEPS, *, streaming: bool = False) -> Any:
        """The rows of `data_files` as a `datasets.Dataset` (`IterableDataset` when streaming).

        Args:
            kind: `steps` or `episodes`.
            streaming: Whether rows are read as they are asked for.

        Raises:
            RolloutError: `datasets` is not installed, or too old.
        """
        files = {form: self._files(kind, form) for form in FORMATS}
        return hugging_face.load(kind, files, streaming=streaming)

    def verify(self) -> None:
        """Compares each file of finished parts with its checksum.

        Raises:
            OutputDamaged: A file is missing, or has changed.
        """
        for reader in self._readers:
            for file in reader.part.files:
                path = present(self.folder / file.name)
                if not path.exists():
                    raise OutputDamaged(f"{path} is missing")
                if digest_of(path).hexdigest() != file.sha256:
                    told = f"{path} has changed since it was written: its checksum differs"
                    raise OutputDamaged(told)

    def _files(self, kind: str, form: str) -> list[str]:
        names = [file.name for reader in self._readers for file in reader.part.files]
        wanted = [n for n in names if n.startswith(f"{kind}-") and n.endswith(f".{form}")]
        return [str(present(self.folder / name)) for name in wanted]

    @cached_property
    def _places(self) -> dict[str, tuple[PartReader, int]]:
        """Of each episode: its part, and its row among the part's episodes."""
        return {
            episode_id: (reader, at)
            for reader in self._readers
            for at, episode_id in enumerate(reader.part.episode_ids)
        }


def open_rollouts(folder: Path | str, *, keep_cached: bool = True) -> Rollouts:
    """Opens a folder of rollouts, also one that is being written.

    Args:
        folder: The folder that was given as `--out`.
        keep_cached: False drops the lines of large episodes (4 MB) from the page cache behind the
            reader, for data that is read once. Mapped arrays stay.

    Returns:
        The episodes that had finished by now.

    Raises:
        OutputDamaged: The folder has no rollouts, or they cannot be understood.
    """
    folder = Path(folder).absolute()  # the working directory may change
    if not manifest.exists(folder):
        raise OutputDamaged(f"{folder} has no rollouts", "name the folder that was given as --out")
    return Rollouts(folder, keep_cached=keep_cached)


class PartReader:
    """The files of one part, opened when they are needed. A growing part has none that is whole."""

    def __init__(
        self, folder: Path, part: Part, groups: Recent, maps: Recent, keep_cached: bool
    ) -> None:
        self.part = part
        self._keep_cached = keep_cached
        self._folder = folder
        self._groups = groups
        self._maps = maps
        self._column_files: dict[str, ColumnsFile] = {}
        known = {Path(file.name).suffix[1:] for file in part.files}
        self._columns = [form for form in (PARQUET, ARROW) if form in known or not known]
        self._has_lines = JSONL in known or not known

    def episodes(self) -> Iterator[EpisodeRow]:
        """In the order of their ids."""
        count = len(self.part.episode_ids)
        return (EpisodeRow(row.whole(), self) for row in self._rows(EPISODES, 0, count))

    def episode(self, at: int) -> EpisodeRow:
        """The one with that row."""
        ends = self._episode_ends
        stretch = (ends[at], ends[at + 1] - ends[at]) if ends else None
        [row] = self._rows(EPISODES, at, 1, stretch)
        return EpisodeRow(row.whole(), self)

    def steps(self, episode: Mapping[str, Any]) -> Iterator[StepRow]:
        """Of that episode, in order."""
        stretch = (episode["steps_offset"], episode["steps_bytes"])
        rows = self._rows(STEPS, episode["first_row"], episode["steps"], stretch)
        return (StepRow(row, self.mapped, episode["arrays_offset"]) for row in rows)

    def mapped(self, told: Sequence[Mapping[str, Any]], start: int) -> dict[str, MappedArray]:
        """The arrays of a step."""
        return {array["name"]: self._array(array, start) for array in told}

    def _array(self, told: Mapping[str, Any], start: int) -> MappedArray:
        paths = self._paths(ARRAYS)
        content = self._maps.get(paths[-1], lambda: opened(paths, mapped))
        first = start + told["offset"]
        data = content[first : first + told["bytes"]]
        if len(data) < told["bytes"]:
            raise OutputDamaged(f"{paths[-1]} ends before the array {told['name']}")
        return MappedArray(data, told["dtype"], tuple(told["shape"]))

    def _rows(
        self, kind: str, first: int, count: int, stretch: tuple[int, int] | None = None
    ) -> Iterator[LineRow | ColumnsRow]:
        """So many rows from there on; in a file of lines, those of the stretch."""
        if not count:
            return
        file = self._lines_file(kind)
        if file is None:
            yield from self._columns_file(kind).rows(first, count)
            return
        with file, readable(Path(file.name)):
            offset, size_bytes = stretch or (0, os.fstat(file.fileno()).st_size)
            keep_cached = self._keep_cached or size_bytes < OWN_PART_BYTES
            with closing(lines(file, offset, size_bytes, keep_cached=keep_cached)) as found:
                for at in range(count):
                    if (line := next(found, None)) is None:
                        raise OutputDamaged(f"{file.name} ends after {at} of {count} rows")
                    yield LineRow(line)

    def _lines_file(self, kind: str) -> FileIO | None:
        """None: it is in columns, by now."""
        if not self._has_lines:
            return None
        try:
            return opened(self._paths(kind), FileIO)
        except OutputDamaged:
            if not self._columns_there(kind):
                raise
            return None

    def _columns_file(self, kind: str) -> ColumnsFile:
        found = self._column_files.get(kind)
        if found is None:
            form = (self._columns_there(kind) or self._columns)[0]
            found = ColumnsFile(self._paths(kind, form), form, self._groups)
            self._column_files[kind] = found
        return found

    def _columns_there(self, kind: str) -> list[str]:
        return [f for f in self._columns if any(p.exists() for p in self._paths(kind, f))]

    @cached_property
    def _episode_ends(self) -> array[int] | None:
        """0, and where each line of the file of episodes ends. None: they are in columns."""
        file = self._lines_file(EPISODES)
        if file is None:
            return None
        ends = array("Q", [0])
        with file:
            for line in lines(file, 0, os.fstat(file.fileno()).st_size):
                ends.append(ends[-1] + len(line) + 1)
        return ends

    def _paths(self, kind: str, form: str = JSONL) -> tuple[Path, Path]:
        """Its names, in the order in which it gets them."""
        path = self._folder / file_name(kind, self.part.number, form)
        return partial(path), path
