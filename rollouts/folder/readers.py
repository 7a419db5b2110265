# SPDX-License-Identifier: Apache-2.0
"""Reads a folder of rollouts lazily: only the current row is in memory.

    rollouts = open_rollouts("out")
    for episode in rollouts:                 # a row per episode, in the order of their ids
        for step in episode.steps():         # rows of steps, parsed as far as they are used
            step.arrays["image"].numpy()

A reader has all finished episodes, even while a rollout runs or after it was killed. The names of
files and the indexes of packs say which episodes a folder has, and where.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote

from ..errors import OutputDamaged, OutputError
from .rows import StepRow, before_checksum, parsed_end

EPISODES, PACKS, UNFINISHED, LOCK = "episodes", "packs", ".unfinished", ".lock"
FILE, PACKING = ".jsonl", ".packing"
GROUP = "group-"
_PACK_NAME = re.compile(rf"\d+({re.escape(FILE)}|{re.escape(PACKING)})")
_TAIL_BYTES = 4096  # more than an episode's last line
_LISTING_TRIES = 100


class Place(NamedTuple):
    """The place of an episode."""

    path: str
    offset: int = 0
    end: int | None = None  # None: the end of the file


def file_name(episode_id: str) -> str:
    """Return `000042.jsonl`, which is never a hidden file, whatever the id."""
    name = quote(episode_id, safe="")
    return (f"%2E{name[1:]}" if name.startswith(".") else name) + FILE


def episodes_in(folder: Path) -> dict[str, Place]:
    """Find all episodes of a folder, even while it is written; `OutputDamaged` without an index."""
    for _ in range(_LISTING_TRIES):
        packs = pack_names(folder)
        found = {unquote(path.stem): Place(str(path)) for path in loose_files(folder)}
        if packs == pack_names(folder):  # no file was packed meanwhile
            with suppress(FileNotFoundError):  # a pack was renamed meanwhile
                for name in sorted(packs, key=lambda name: name.endswith(PACKING)):
                    found.update(places_in(folder / PACKS / name))
                return found
    raise OutputError(f"{folder} changes faster than it can be listed")


def has_rollouts(folder: Path) -> bool:
    """Return whether a rollout has written to the folder."""
    return any((folder / name).is_dir() for name in (EPISODES, PACKS))


def pack_names(folder: Path) -> list[str]:
    """Return the names of packs; files with other names, such as NFS's `.nfs…`, are ignored."""
    return [name for name in names(folder / PACKS) if _PACK_NAME.fullmatch(name)]


def loose_files(folder: Path) -> Iterator[Path]:
    """Return the files of single episodes, including those of groups."""
    for name in names(folder / EPISODES):
        if is_group(name):
            group = folder / EPISODES / name
            yield from (group / one for one in names(group) if one.endswith(FILE))
        elif name.endswith(FILE):
            yield folder / EPISODES / name


def is_group(name: str) -> bool:
    """Return whether an entry of `episodes/` is the folder of a group."""
    return name.startswith(GROUP) and not name.endswith(FILE)


def places_in(path: Path) -> dict[str, Place]:
    """Return the episodes of a pack, or the one episode of another file.

    Raises `OutputDamaged`: its last line, which has the index of a pack, is missing.
    """
    with path.open("rb", buffering=0) as file:
        _, line = last_line(file)
    row = parsed_end(line, path)
    index = row.get("index") or [(row["episode_id"], 0)]
    ends = [*(offset for _, offset in index[1:]), path.stat().st_size]
    return {
        episode_id: Place(str(path), offset, end)
        for (episode_id, offset), end in zip(index, ends, strict=True)
    }


def last_line(file: IO[bytes], end: int | None = None) -> tuple[int, bytes]:
    """Return the last line of a file, or of its part before `end`, and where the line begins."""
    end = os.fstat(file.fileno()).st_size if end is None else end
    size_bytes = _TAIL_BYTES
    while True:
        begin = max(0, end - size_bytes)
        tail = os.pread(file.fileno(), end - begin, begin)
        if (at := tail.rfind(b"\n", 0, -1)) >= 0 or begin == 0:
            return begin + at + 1, tail[at + 1 :]
        size_bytes *= 8


def names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; an empty list if there is no folder."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  a hundred thousand names
    except FileNotFoundError:
        return []


# Attempts to find an episode whose file was renamed: in the pack that another row has found, and in
# that pack under its present name, before and after its last rename.
_TRIES = 4
BLOCK_BYTES = 256 << 10  # of a file, in memory


class Rollouts:
    """A folder of rollouts, as of its opening. Can be pickled for other processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = episodes_in(folder)
        ordered = sorted(found, key=lambda name: (len(name), name))  # numbers by their value
        self._places = {name: found[name] for name in ordered}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[EpisodeRow]:
        return map(self.episode, self._places)

    def episode_ids(self) -> list[str]:
        """Return the ids in the order of iteration."""
        return list(self._places)

    def episode(self, episode_id: str) -> EpisodeRow:
        """Return the episode with this id.

        Raises `KeyError`: there is none.
        """
        return EpisodeRow(episode_id, self.folder, self._places)

    def verify(self) -> None:
        """Compare each episode with its checksum.

        Raises `OutputDamaged`: a file is missing, or has changed.
        """
        for episode in self:
            episode.verify()


class EpisodeRow:
    """One episode: `row` has its totals, the rest is read on demand."""

    def __init__(self, episode_id: str, folder: Path, places: dict[str, Place]) -> None:
        self.id = episode_id
        self._folder = folder
        self._places = places  # all rows share them, so that one row lists the folder for all
        self._place = places[episode_id]
        with self._opened(buffering=0) as file:
            begin, line = last_line(file, self._place.end)
        totals = parsed_end(line, self._place.path)
        self._lines_bytes = begin - self._place.offset  # without the last, which a pack changes
        self._last_bytes = totals.pop("last_bytes")
        self._sha256 = totals.pop("sha256")
        totals.pop("index", None)
        self.row: Mapping[str, Any] = totals

    def __getstate__(self) -> dict[str, Any]:
        """Pickle this row without the places of other episodes."""
        # The ids of its ancestors are beginnings of its own.
        names = accumulate(self.id.split("."), "{}.{}".format)
        ancestors = {name: self._places[name] for name in names if name in self._places}
        return vars(self) | {"_places": ancestors | {self.id: self._place}}

    @property
    def final_observation(self) -> Any:
        """Return the observation after the last step; None if no steps are kept."""
        if not self._last_bytes:
            return None
        with self._opened(buffering=0) as file:
            begin = self._place.offset + self._lines_bytes - self._last_bytes
            line = os.pread(file.fileno(), self._last_bytes, begin)
        return StepRow(line).observation

    def steps(self) -> Iterator[StepRow]:
        """Yield the steps in order; of a branch, first those that its parent has."""
        begin_step = self.row.get("branched_at") or 0
        if begin_step and self.row["steps"] > begin_step:
            parent = EpisodeRow(self.row["parent"], self._folder, self._places)
            yield from islice(parent.steps(), begin_step)
        count = max(0, self.row["steps"] - begin_step)
        with self._opened() as file:
            file.seek(self._place.offset)
            rest = self._lines_bytes
            for number in range(count):
                line = file.readline()
                rest -= len(line)
                if not line.endswith(b"\n") or rest < 0:
                    path = self._place.path
                    raise OutputDamaged(f"{path} has {number} of {count} steps of {self.id}")
                yield StepRow(line)

    def verify(self) -> None:
        """Compare the episode with its checksum.

        Raises `OutputDamaged`: its file is missing, or has changed.
        """
        digest = hashlib.sha256()
        with self._opened() as file:
            file.seek(self._place.offset)
            rest = self._lines_bytes
            while rest > 0 and (block := file.read(min(rest, BLOCK_BYTES))):
                digest.update(block)
                rest -= len(block)
            digest.update(before_checksum(file.readline()))
        if digest.hexdigest() != self._sha256:
            path = self._place.path
            message = f"{path} has changed since it was written: {self.id} has another checksum"
            raise OutputDamaged(message)

    @contextmanager
    def _opened(self, buffering: int = BLOCK_BYTES) -> Iterator[IO[bytes]]:
        for _ in range(_TRIES):
            try:
                file = open(self._place.path, "rb", buffering)  # noqa: SIM115
            except FileNotFoundError:  # it has gone into a pack
                if self._places[self.id].path == self._place.path:  # no other row has listed it
                    listed = episodes_in(self._folder)
                    self._places |= {n: listed[n] for n in self._places if n in listed}
                self._place = self._places[self.id]
                continue
            with file:
                yield file
            return
        raise OutputDamaged(f"{self._place.path} is missing")


def open_rollouts(folder: Path | str) -> Rollouts:
    """Open a folder of rollouts, even one that is being written.

    Args:
        folder: The folder that was given as `--out`.

    Returns:
        The episodes that have finished by now.

    Raises `OutputDamaged`: the folder has no rollouts, or they cannot be understood.
    """
    folder = Path(folder).absolute()  # the working directory may change
    if not has_rollouts(folder):
        raise OutputDamaged(f"{folder} has no rollouts", "name the folder that was given as --out")
    return Rollouts(folder)
