# SPDX-License-Identifier: Apache-2.0
"""A folder while it is written: what ends there, and in which order it becomes durable.

One writer uses it, and calls one method at a time from its threads. A method blocks on the disk.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import OutputBusy
from .damage import FolderCheck, whole_episodes
from .disk import Disk
from .packs import Pack, finish_interrupted, next_number, pack, small_files
from .readers import EPISODES, FILE, GROUP, LOCK, PACKS, UNFINISHED, file_name
from .rows import LARGE_BYTES, EpisodeFile

MAX_FILES = 4096  # that a writer makes before it packs small ones
MIN_PACKED = 64  # small files, when a rollout has ended


class Output:
    """A folder that is open for writing."""

    def __init__(self, folder: Path, disk: Disk, group: int = 1) -> None:
        """Locks the folder, repairs what an earlier writer left, and sets aside what is damaged.

        Raises:
            OutputBusy: Another rollout writes there.
        """
        self.folder = folder
        self._disk = disk
        self._numbers = count()
        self._made = 0  # files, since small ones were packed
        self._lock = _lock(folder)
        try:
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            for name in (EPISODES, PACKS, UNFINISHED):
                (folder / name).mkdir(exist_ok=True)
            self._packs = count(next_number(folder))
            self._found = FolderCheck(folder, disk, group)
            self._found.run(self._new_pack)
            finish_interrupted(folder, disk)
            self._found.look()
            self.earlier = frozenset(self._found.episodes)
        except BaseException:
            self._lock.close()
            raise

    def new_file(self, episode_id: str) -> EpisodeFile:
        """Makes the file of an attempt."""
        return EpisodeFile(episode_id, self._unfinished())

    def commit(self, ended: Sequence[Sequence[EpisodeFile]]) -> None:
        """Write these episodes and groups; return when all exist. A group exists as a whole.

        What is in memory only becomes one pack. One `sync` of a folder makes durable what was
        written and renamed before it.
        """
        small = [files for files in ended if not any(file.size_bytes for file in files)]
        large = [files for files in ended if any(file.size_bytes for file in files)]
        if small:
            unfinished, final = self._new_pack()
            made = Pack(unfinished, self._disk)
            members = [file for files in small for file in files]
            for file in members:
                made.add(file.content(), [(file.episode_id, 0)])
            made.finish()
            self._disk.rename(unfinished, final)
            self._disk.sync(final.parent)
            self._found.add(final, [file.episode_id for file in members])
            self._made += 1
        for files in large:
            self._rename(files)
        if large:
            self._disk.sync(self.folder / EPISODES)
        if self._made >= MAX_FILES:
            self._pack()

    def check(self) -> tuple[frozenset[str], list[str]]:
        """Sets aside what others have damaged since the last time.

        Returns:
            The episodes that have been lost by it, and what was found, for people.
        """
        self._found.run(self._new_pack)
        lost, words = frozenset(self._found.lost), self._found.words
        self._found.lost, self._found.words = set(), []
        return lost, words

    def close(self, *, has_ended: bool) -> None:
        """Forgets unfinished episodes, and lets others write; packs small files if it has ended."""
        try:
            if has_ended:
                self._pack()
        finally:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
            self._lock.close()

    def _rename(self, files: Sequence[EpisodeFile]) -> None:
        for file in files:
            file.write(self._disk, write_back=True)
            self._disk.settle(file.path, drop_cached=file.size_bytes >= LARGE_BYTES)
        ids = [file.episode_id for file in files]
        touched = (file for file in files if file.is_touched)
        if any(file.episode_id not in whole_episodes(file.path) for file in touched):
            self._found.drop(ids, [file.path for file in files])
            return
        folder = self.folder / EPISODES
        if len(files) > 1:
            together = self._unfinished()
            together.mkdir()
            for file in files:
                self._disk.rename(file.path, together / file_name(file.episode_id))
            folder /= GROUP + file_name(ids[0]).removesuffix(FILE)
            self._disk.rename(together, folder)
        else:
            self._disk.rename(files[0].path, folder / file_name(ids[0]))
        for episode_id in ids:
            self._found.add(folder / file_name(episode_id), [episode_id])
        self._made += len(files)

    def _pack(self) -> None:
        self._made = 0
        self._found.run(self._new_pack)
        files = small_files(self.folder)
        if len(files) >= MIN_PACKED:
            pack(self.folder, files, self._packs, self._unfinished(), self._disk)
            self._found.look()

    def _new_pack(self) -> tuple[Path, Path]:
        """A pack's name while it is written, and its last one."""
        return self._unfinished(), self.folder / PACKS / f"{next(self._packs):05}{FILE}"

    def _unfinished(self) -> Path:
        """A name that nothing had before; an episode's id may be any text."""
        return self.folder / UNFINISHED / str(next(self._numbers))


def _lock(folder: Path) -> Any:
    """Locks the folder until the file is closed, also by a crash."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise OutputBusy(f"another rollout writes to {folder}") from exc
    return file
