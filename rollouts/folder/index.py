# SPDX-License-Identifier: Apache-2.0
"""Which episodes a folder has, and where: from the names of files, and the indexes of packs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from ..errors import OutputError
from .rows import parsed_end

EPISODES, PACKS, UNFINISHED, LOCK = "episodes", "packs", ".unfinished", ".lock"
FILE, PACKING = ".jsonl", ".packing"
GROUP = "group-"
_PACK_NAME = re.compile(rf"\d+({re.escape(FILE)}|{re.escape(PACKING)})")
_TAIL_BYTES = 4096  # more than an episode's last line
_TRIES = 100


class Place(NamedTuple):
    """Where an episode lies."""

    path: str
    offset: int = 0
    end: int | None = None  # None: that of the file


def file_name(episode_id: str) -> str:
    """`000042.jsonl`. Never a hidden file, whatever the id."""
    name = quote(episode_id, safe="")
    return (f"%2E{name[1:]}" if name.startswith(".") else name) + FILE


def sort_key(episode_id: str) -> tuple[int, str]:
    """Orders ids that are numbers by these."""
    return len(episode_id), episode_id


def exists(folder: Path) -> bool:
    """Whether a rollout was written there."""
    return (folder / EPISODES).is_dir()


def episodes_in(folder: Path) -> dict[str, Place]:
    """All episodes of a folder, also while it is written.

    Raises:
        OutputDamaged: A pack has no index.
    """
    for _ in range(_TRIES):
        packs = pack_names(folder)
        found = {unquote(path.stem): Place(str(path)) for path in loose_files(folder)}
        if packs == pack_names(folder):  # nothing went into a pack meanwhile
            with suppress(FileNotFoundError):  # it has got its last name
                for name in sorted(packs, key=lambda name: name.endswith(PACKING)):
                    found.update(places_in(folder / PACKS / name))
                return found
    raise OutputError(f"{folder} changes faster than it can be listed")


def pack_names(folder: Path) -> list[str]:
    """The packs of a rollout by name; files of other names, such as NFS's `.nfs…`, are ignored."""
    return [name for name in names(folder / PACKS) if _PACK_NAME.fullmatch(name)]


def loose_files(folder: Path) -> Iterator[Path]:
    """The episodes' own files, also those of groups."""
    for name in names(folder / EPISODES):
        if is_group(name):
            group = folder / EPISODES / name
            yield from (group / one for one in names(group) if one.endswith(FILE))
        elif name.endswith(FILE):
            yield folder / EPISODES / name


def is_group(name: str) -> bool:
    """Whether something among the episodes is the folder of a group."""
    return name.startswith(GROUP) and not name.endswith(FILE)


def places_in(path: Path) -> dict[str, Place]:
    """The episodes of a pack, or the one of another file.

    Raises:
        OutputDamaged: Its last line, which has the index of a pack, is missing.
    """
    _, line = last_line(path)
    row = parsed_end(line, path)
    index = row.get("index") or [(row["episode_id"], 0)]
    ends = [*(offset for _, offset in index[1:]), path.stat().st_size]
    return {
        episode_id: Place(str(path), offset, end)
        for (episode_id, offset), end in zip(index, ends, strict=True)
    }


def last_line(path: Path, end: int | None = None) -> tuple[int, bytes]:
    """Where the last line of a file begins, or of the part of it before `end`; and the line."""
    with path.open("rb", buffering=0) as file:
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
