# SPDX-License-Identifier: Apache-2.0
"""Reads a folder of rollouts, lazily: nothing is in memory but the row that is looked at.

    rollouts = open_rollouts("out")
    for episode in rollouts:                 # a row per episode, as it was finished
        for step in episode.steps():         # rows of steps, with their arrays mapped, not copied
            step.arrays["image"].numpy()

Only what is finished for certain is seen, also while a rollout is running (its growing part is not,
until it is full). For Hugging Face's `datasets`:

    load_dataset("json", data_files=rollouts.data_files("steps"))
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import manifest
from .columnar import JSON_COLUMNS, arrow
from .disk import blocks, typed
from .episodes import Array
from .errors import OutputDamaged
from .layout import (
    ARRAYS,
    ARROW,
    EPISODES,
    JOURNAL,
    JSONL,
    MANIFEST,
    PARQUET,
    STEPS,
    Part,
    PartFile,
    file_name,
    parse,
)

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class MappedArray(Array):
    """An array in a mapped file: its pages are read when they are touched, and never copied."""

    def numpy(self) -> np.ndarray[Any, Any]:
        """As numpy's, read-only, on the same memory."""
        import numpy as np

        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, as it was written."""

    number: int
    observation: Any
    action: Any
    reward: float | None
    done: bool
    info: Mapping[str, Any]
    arrays: Mapping[str, MappedArray]


@dataclass(frozen=True)
class EpisodeRow:
    """One episode: `row` has its totals, `steps()` reads the rest."""

    row: Mapping[str, Any]
    _part: _PartReader

    @property
    def id(self) -> str:
        return str(self.row["episode_id"])

    def steps(self) -> Iterator[StepRow]:
        """In order."""
        return self._part.steps(self.row)


class Rollouts:
    """A folder of rollouts, as it was when this was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known = manifest.read(folder)
        self._readers = [_PartReader(folder, part) for _, part in sorted(self._known.parts.items())]

    def __len__(self) -> int:
        return sum(len(part.episode_ids) for part in self._known.parts.values())

    def __iter__(self) -> Iterator[EpisodeRow]:
        for reader in self._readers:
            yield from reader.episodes()

    @property
    def steps(self) -> int:
        """Of all episodes."""
        return sum(part.steps for part in self._known.parts.values())

    def episode_ids(self) -> list[str]:
        """In the order in which `for` gives them."""
        return [i for reader in self._readers for i in reader.part.episode_ids]

    def episode(self, episode_id: str) -> EpisodeRow:
        """The one with that id.

        Raises:
            KeyError: there is none.
        """
        reader = self._reader_of[episode_id]
        return next(episode for episode in reader.episodes() if episode.id == episode_id)

    def data_files(self, kind: str = STEPS) -> list[str]:
        """The files of `steps` or `episodes`, as `datasets.load_dataset` takes them."""
        names = [f.name for reader in self._readers for f in reader.part.files]
        return [str(self.folder / name) for name in names if name.startswith(f"{kind}-")]

    def verify(self) -> None:
        """Read every file, and compare.

        Raises:
            OutputDamaged: one is missing, or is not what it was.
        """
        for reader in self._readers:
            for file in reader.part.files:
                _verify(self.folder / file.name, file)

    @cached_property
    def _reader_of(self) -> dict[str, _PartReader]:
        return {i: reader for reader in self._readers for i in reader.part.episode_ids}


def open_rollouts(folder: Path | str) -> Rollouts:
    """What is finished in a folder.

    Raises:
        OutputDamaged: there are no rollouts, or they cannot be understood.
    """
    folder = Path(folder)
    if not ((folder / MANIFEST).exists() or (folder / JOURNAL).exists()):
        raise OutputDamaged(f"{folder} has no rollouts", "name the folder that was given as --out")
    return Rollouts(folder)


class _PartReader:
    """The files of one part, opened when they are needed."""

    def __init__(self, folder: Path, part: Part) -> None:
        self.part = part
        self._folder = folder
        forms = {Path(file.name).suffix[1:] for file in part.files}
        self._form = next(form for form in (JSONL, PARQUET, ARROW) if form in forms)

    def episodes(self) -> Iterator[EpisodeRow]:
        path = self._path(EPISODES)
        rows = _lines(path) if self._form == JSONL else _rows(path, self._form, 0, None)
        return (EpisodeRow(row, self) for row in rows)

    def steps(self, episode: Mapping[str, Any]) -> Iterator[StepRow]:
        if not episode["steps"]:
            return iter(())
        path = self._path(STEPS)
        if self._form == JSONL:
            rows = _lines(path, episode["steps_offset"], episode["steps_bytes"])
        else:
            rows = _rows(path, self._form, episode["first_row"], episode["steps"])
        return (self._step(row, episode) for row in rows)

    def _step(self, row: Mapping[str, Any], episode: Mapping[str, Any]) -> StepRow:
        start = episode["arrays_offset"]
        arrays = {array["name"]: self._array(array, start) for array in row["arrays"]}
        told = (row["observation"], row["action"], row["reward"], row["done"], row["info"])
        return StepRow(row["step"], *told, arrays)

    def _array(self, array: Mapping[str, Any], start: int) -> MappedArray:
        first = start + array["offset"]
        data = self._arrays[first : first + array["bytes"]]
        return MappedArray(data, array["dtype"], tuple(array["shape"]))

    @cached_property
    def _arrays(self) -> memoryview:
        """The mapped file. It stays mapped for as long as any array of it is held."""
        path = self._path(ARRAYS)
        with _opened(path) as file:
            if not path.stat().st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _path(self, kind: str) -> Path:
        return self._folder / file_name(kind, self.part.number, self._form)


def _lines(path: Path, offset: int = 0, size_bytes: int | None = None) -> Iterator[Any]:
    """The rows in a stretch of a JSONL file."""
    with _opened(path) as file:
        file.seek(offset)
        end = None if size_bytes is None else offset + size_bytes
        while (end is None or file.tell() < end) and (line := file.readline()):
            yield parse(line)


def _rows(path: Path, form: str, first: int, count: int | None) -> Iterator[Any]:
    """Rows of a file in columns, a batch in memory at a time."""
    end = None if count is None else first + count
    at = 0
    for batch in _parquet(path) if form == PARQUET else _arrow(path):
        stop = batch.num_rows if end is None else min(batch.num_rows, end - at)
        begin = max(0, first - at)
        if begin < stop:
            yield from map(_parsed, batch.slice(begin, stop - begin).to_pylist())
        at += batch.num_rows
        if end is not None and at >= end:
            return


def _parquet(path: Path) -> Iterator[Any]:
    with _opened(path):
        file = arrow("pyarrow.parquet").ParquetFile(path)
    with file:
        yield from file.iter_batches()


def _arrow(path: Path) -> Iterator[Any]:
    pyarrow = arrow()
    with _opened(path), pyarrow.memory_map(str(path)) as source:
        reader = pyarrow.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _parsed(row: dict[str, Any]) -> dict[str, Any]:
    for name in JSON_COLUMNS:
        if name in row:
            row[name] = parse(row[name])
    return row


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise OutputDamaged(f"{path} is missing")
    with typed(path), path.open("rb") as file:
        yield file


def _verify(path: Path, file: PartFile) -> None:
    if not path.exists():
        raise OutputDamaged(f"{path} is missing")
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    if digest.hexdigest() != file.sha256:
        raise OutputDamaged(f"{path} has changed since it was written: its checksum differs")
