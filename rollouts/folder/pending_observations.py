# SPDX-License-Identifier: Apache-2.0
"""Last observations of episodes that wait for others: on disk meanwhile, where they are large.

An episode that has ended may wait for its group for as long as the group's slowest takes. Its steps
are in the spool by then; what it saw last goes there, too. Nothing of it is read after a crash: the
next start empties the folder.
"""

from __future__ import annotations

from pathlib import Path

from ..episodes import BytesLike
from .disk import Disk


class Asides:
    """By episode; used by the writer's thread alone, but for reading."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._paths: dict[str, Path] = {}
        self._made = 0

    def put(self, episode_id: str, text: BytesLike) -> Path:
        """Where it can be read until it is forgotten."""
        self._made += 1
        path = self._paths[episode_id] = self._folder / f"{self._made}.last"
        self._disk.append(path, [text])
        return path

    def forget(self, episode_id: str) -> None:
        """Nobody wants it any more, if there was any."""
        path = self._paths.pop(episode_id, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def forget_all(self) -> None:
        """Nobody wants any of them."""
        for episode_id in list(self._paths):
            self.forget(episode_id)
