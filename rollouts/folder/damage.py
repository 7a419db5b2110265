# SPDX-License-Identifier: Apache-2.0
"""Finds files that were changed since they were written, and sets them aside.

    each file ─▶ size, time and inode as last recorded ─▶ intact
              └─ otherwise ─▶ read, and compare each checksum ─▶ intact, or damaged

A damaged file is moved to `damaged/`, and a damaged pack's intact episodes go into a new pack. A
group is played as a whole: if one of its episodes is lost, the others are set aside, too. A writer
reads all files when it begins, and at its end those that other programs have touched. `.files` has
a line for each file with its episodes, so that the next writer notices removed files.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import msgspec
import orjson

from ..episodes import number_of
from ..errors import OutputDamaged
from .disk import Disk, Stamp, stamp_of
from .packs import write_pack
from .readers import PACKS, UNFINISHED, Place, loose_files, pack_names, places_in
from .rows import END_START, before_checksum, parsed_end, without_index

DAMAGED, KNOWN_FILES = "damaged", ".files"


class FolderCheck:
    """The expected contents of a folder.

    Attributes:
        episodes: The ids of the existing episodes.
        lost: The ids of lost episodes, which are played again.
        words: The findings, for people.
    """

    def __init__(self, folder: Path, disk: Disk, group: int) -> None:
        self.episodes: set[str] = set()
        self.lost: set[str] = set()
        self.words: list[str] = []
        self._folder = folder
        self._disk = disk
        self._group = group
        self._stamps: dict[Path, Stamp | None] = {}
        self._known = _known_files(folder)

    def add(self, path: Path, episode_ids: Sequence[str], *, is_touched: bool = False) -> None:
        """Record a file that has its final name; `run` reads it if another program touched it."""
        self.episodes.update(episode_ids)
        self._stamps[path] = None if is_touched else stamp_of(path)
        self._known[path] = episode_ids
        with (self._folder / KNOWN_FILES).open("ab") as file:
            file.write(self._line(path))

    def look(self) -> None:
        """Record all files in their present state, after small ones have been packed."""
        self._stamps = {path: stamp_of(path) for path in _files(self._folder)}
        self._known = {p: self._known.get(p) or list(places_in(p)) for p in self._stamps}
        made = self._folder / UNFINISHED / KNOWN_FILES
        made.parent.mkdir(exist_ok=True)
        made.write_bytes(b"".join(map(self._line, self._known)))
        made.replace(self._folder / KNOWN_FILES)

    def run(self, new_pack: Callable[[], tuple[Path, Path]]) -> None:
        """Set damaged files aside. `new_pack` returns a pack's temporary and its final name."""
        found: dict[Path, dict[str, Place]] = {}
        damaged: set[Path] = set()
        for path in _files(self._folder):
            stamp = stamp_of(path)
            if stamp is not None and stamp == self._stamps.get(path):
                found[path] = places_in(path)
            elif not path.is_file():  # reading a folder, a pipe or a device fails or may never end
                damaged.add(path)
                found[path] = {}
            elif not _is_whole(path, whole := whole_episodes(path)):
                damaged.add(path)
                found[path] = whole if path.parent.name == PACKS else {}
            else:
                found[path] = whole
        there = {name for places in found.values() for name in places}
        for path in sorted(self._known.keys() - found.keys()):
            if not there.issuperset(self._known[path]):
                self.words.append(f"{path.relative_to(self._folder)} was removed")
        known = {name for names in self._known.values() for name in names}
        numbers = {
            name: number_of(name) // self._group
            for name in there | known
            if name.partition(".")[0].isdecimal()
        }
        sizes = Counter(n for name, n in numbers.items() if name.isdecimal() and name in there)
        lost_branches = {numbers[name] for name in numbers.keys() - there if "." in name}
        partial = {
            name
            for name, number in numbers.items()
            if name in there and (sizes[number] < self._group or number in lost_branches)
        }
        self.lost |= (self.episodes - there) | partial
        self.episodes = there - partial
        aside = [path for path in found if path in damaged or not partial.isdisjoint(found[path])]
        elsewhere = {name for path in found.keys() - set(aside) for name in found[path]} | partial
        for path in aside:
            kept = {name: at for name, at in found[path].items() if name not in elsewhere}
            elsewhere |= kept.keys()
            why = "was cut or changed" if path in damaged else "has a part of a group"
            moved = self._set_aside(path, f"{path.relative_to(self._folder)} {why}")
            if kept and path.parent.name == PACKS:
                whole_ones = ((name, _content(moved, at)) for name, at in kept.items())
                write_pack(whole_ones, *new_pack(), self._disk)
        self.look()

    def _line(self, path: Path) -> bytes:
        return orjson.dumps([str(path.relative_to(self._folder)), self._known[path]]) + b"\n"

    def _set_aside(self, path: Path, why: str) -> Path:
        name = str(path.relative_to(self._folder)).replace("/", "-").lstrip(".")
        aside = self._folder / DAMAGED / f"{name}.{os.urandom(2).hex()}"
        aside.parent.mkdir(exist_ok=True)
        self._disk.rename(path, aside)
        self.words.append(f"{why}; it is {aside.relative_to(self._folder)} now")
        return aside


def whole_episodes(path: Path) -> dict[str, Place]:
    """Return a file's episodes with a valid checksum, even if the file's index is damaged."""
    found: dict[str, Place] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        begin, end, digest = 0, 0, hashlib.sha256()
        for line in file:
            end += len(line)
            if not line.startswith(END_START):
                digest.update(line)
                continue
            digest.update(before_checksum(line))
            with suppress(OutputDamaged):
                row = parsed_end(without_index(line), path)
                if row["sha256"] == digest.hexdigest():
                    found[row["episode_id"]] = Place(str(path), begin, end)
            begin, digest = end, hashlib.sha256()
    return found


def _is_whole(path: Path, whole: dict[str, Place]) -> bool:
    """Return whether a file has exactly these episodes by its index or its name."""
    try:
        places = places_in(path)
    except (OutputDamaged, OSError, ValueError, TypeError):  # or the index has an unknown form
        return False
    named = path.parent.name == PACKS or list(places) == [unquote(path.stem)]
    return named and places == whole


def _content(path: Path, place: Place) -> bytes:
    """Return the lines of an episode, without the index of its pack."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return without_index(file.read((place.end or 0) - place.offset))


def _known_files(folder: Path) -> dict[Path, Sequence[str]]:
    """Return the files of an earlier writer, each with the ids of its episodes."""
    found: dict[Path, Sequence[str]] = {}
    with suppress(OSError, msgspec.DecodeError):  # the last line may have been cut by a crash
        for line in (folder / KNOWN_FILES).read_bytes().splitlines():
            name, episode_ids = msgspec.json.decode(line, type=tuple[str, list[str]])
            found[folder / name] = episode_ids
    return found


def _files(folder: Path) -> list[Path]:
    return [*loose_files(folder), *(folder / PACKS / name for name in pack_names(folder))]
