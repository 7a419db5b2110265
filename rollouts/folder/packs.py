# SPDX-License-Identifier: Apache-2.0
"""Packs: files that hold several episodes each. The last line of a pack ends with an index.

Small files, including small packs, are joined; `folder/__init__.py` has the effects of a crash:

    small files ─▶ .unfinished/N ─rename─▶ packs/N.packing ─▶ small files removed ─▶ packs/N.jsonl
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from urllib.parse import unquote

import msgspec

from ...system.files.disk_space import is_full
from ..errors import OutputDamaged
from . import readers
from .disk import Disk, stamp_of
from .rows import END_OF_LINE, parsed_end, without_index

PACK_BYTES = 64 << 20
SMALL_BYTES = 1 << 20  # files smaller than this are packed
_WRITE_BYTES = 4 << 20

log = logging.getLogger(__name__)


class Pack:
    """A pack that is being written."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.size_bytes = 0
        self._disk = disk
        self._index: list[tuple[str, int]] = []  # ids, and where they begin
        self._chunks: list[bytes] = []
        self._written_bytes = 0

    def add(self, content: bytes, index: Sequence[tuple[str, int]]) -> None:
        """Add episodes: `content` has their lines, `index` each one's id and offset."""
        if self.size_bytes - self._written_bytes >= _WRITE_BYTES:
            self._disk.append(self.path, self._chunks, write_back=True)
            self._chunks.clear()
            self._written_bytes = self.size_bytes
        self._index += [(episode_id, self.size_bytes + offset) for episode_id, offset in index]
        self._chunks.append(content)
        self.size_bytes += len(content)

    def finish(self) -> None:
        """Append the index to the last line. After this, the pack may be renamed."""
        self._chunks[-1] = self._chunks[-1][: -len(END_OF_LINE)]
        index = b',"index":' + msgspec.json.encode(self._index) + END_OF_LINE
        self._disk.append(self.path, [*self._chunks, index], write_back=True)
        self._disk.sync(self.path)


def write_pack(
    episodes: Iterable[tuple[str, bytes]], unfinished: Path, final: Path, disk: Disk
) -> None:
    """Write a pack of `episodes`, given as ids and lines. The pack is durable on return."""
    made = Pack(unfinished, disk)
    for episode_id, content in episodes:
        made.add(content, [(episode_id, 0)])
    made.finish()
    disk.rename(unfinished, final)
    disk.sync(final.parent)


def next_number(folder: Path) -> int:
    """Return the number of a folder's next pack."""
    return max((int(name.partition(".")[0]) for name in readers.pack_names(folder)), default=-1) + 1


def small_files(folder: Path) -> list[Path]:
    """List the files that are worth packing, in the order of their names."""
    packs = (
        folder / readers.PACKS / name
        for name in readers.pack_names(folder)
        if name.endswith(readers.FILE)
    )
    found = []
    for path in chain(readers.loose_files(folder), packs):
        stamp = stamp_of(path)  # None: a person removed its episode
        if stamp is not None and stamp[0] < SMALL_BYTES:
            found.append(path)
    return found


def pack(
    folder: Path, files: Sequence[Path], numbers: Iterator[int], unfinished: Path, disk: Disk
) -> None:
    """Pack these files (episodes or packs), or as many as fit the disk.

    Raises `OSError`: the file system refused for a reason other than lack of space.
    """
    rest = list(files)
    while rest:
        made = Pack(unfinished, disk)
        packed = []
        try:
            while rest and made.size_bytes < PACK_BYTES:
                path = rest.pop(0)
                if _add_file(made, path):
                    packed.append(path)
            if packed:
                made.finish()
        except OSError as exc:
            if not is_full(exc):
                raise
            disk.remove(unfinished)
            log.warning("small episodes stay in files of their own: %s", exc)
            return
        if packed:  # if this fails, the next writer completes the operation
            packing = folder / readers.PACKS / f"{next(numbers):05}{readers.PACKING}"
            disk.rename(made.path, packing)
            disk.sync(packing.parent)
            _put_in_place(folder, packing, packed, disk)


def finish_interrupted(folder: Path, disk: Disk) -> None:
    """Remove files whose episodes are in an unfinished pack, then rename that pack."""
    packs = folder / readers.PACKS
    names = [name for name in readers.pack_names(folder) if name.endswith(readers.PACKING)]
    for packing in (packs / name for name in names):
        packed = readers.places_in(packing).keys()
        doubled = []
        for path in small_files(folder):
            # The name of a file with one episode has its id, even if the file is damaged.
            ids = readers.places_in(path) if path.parent == packs else [unquote(path.stem)]
            if not packed.isdisjoint(ids):
                doubled.append(path)
        _put_in_place(folder, packing, doubled, disk)


def _add_file(made: Pack, path: Path) -> bool:
    """Add a file's episodes. A damaged one stays unchanged, so that `verify` finds it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # a person removed its episode
        return False
    try:
        row = parsed_end(content[content.rfind(b"\n", 0, -1) + 1 :], path)
    except OutputDamaged:
        return False
    index = row.get("index") or [(row["episode_id"], 0)]
    made.add(without_index(content), index)
    return True


def _put_in_place(folder: Path, packing: Path, packed: Sequence[Path], disk: Disk) -> None:
    (folder / readers.EPISODES).mkdir(exist_ok=True)  # someone may have removed it
    for path in packed:
        disk.remove(path)
    for name in readers.names(folder / readers.EPISODES):
        if readers.is_group(name) and not readers.names(folder / readers.EPISODES / name):
            disk.remove(folder / readers.EPISODES / name)
    disk.sync(folder / readers.EPISODES)
    disk.sync(packing.parent)
    disk.rename(packing, packing.with_suffix(readers.FILE))
    disk.sync(packing.parent)
