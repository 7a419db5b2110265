# SPDX-License-Identifier: Apache-2.0
"""Remove the virtual environments of projects that nothing uses any more.

    used by a replica    its run file names the Python: it stays, and what it is laid over
    used by a launch     says so before it looks for the Python (`note_use`): it stays for a while
    being made           its lock is held: it stays
    half made            by a launch that was killed: as old as it was last written
    anything else        is removed once it was unused for long enough

A launch may look for one while it is being removed. So `complete` is renamed first, which a
launch then does not find (it waits for the lock, and makes the environment anew), and it is looked
at again under its new name, in case a launch had found it just before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .. import run_files
from ..layout import Layout
from .project_venv import COMPLETE, note_use, noted_of

LAUNCH_SECONDS = 60.0  # at least, from asking for a Python until the run file is written
_GOING = f"{COMPLETE}.going"
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are


class Venv(NamedTuple):
    """A virtual environment; `project` is the folder it was made for, where that is known."""

    path: Path
    project: str | None
    used_at: float


class Pruned(NamedTuple):
    """A virtual environment that was removed."""

    path: Path
    project: str | None
    used_at: float
    freed_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**self._asdict(), "path": str(self.path)}


def prune(layout: Layout, *, keep_seconds: float = 0.0) -> list[Pruned]:
    """Remove the environments that nothing has used for `keep_seconds`. Blocks."""
    found, used = list(venvs_of(layout)), in_use(layout)
    for venv in found:
        if venv.path in used:
            note_use(venv.path)
    chosen = unused(found, used, now=time.time(), keep_seconds=keep_seconds)
    return [gone for venv in chosen if (gone := _remove(venv)) is not None]


def unused(
    found: Iterable[Venv], used: set[Path], *, now: float, keep_seconds: float
) -> list[Venv]:
    """Choose the environments to remove."""
    oldest = now - max(keep_seconds, LAUNCH_SECONDS)
    return [venv for venv in found if venv.path not in used and venv.used_at < oldest]


def venvs_of(layout: Layout) -> Iterator[Venv]:
    """List all environments."""
    for path in layout.venvs.glob("*/"):
        with contextlib.suppress(FileNotFoundError):
            complete = path / COMPLETE
            used_at = (complete if complete.exists() else path).stat().st_mtime
            yield Venv(path, noted_of(path).get("project"), used_at)


def in_use(layout: Layout) -> set[Path]:
    """Find the environments whose Python a replica runs, or will be restarted with."""
    commands = [run_file.data.get("argv") for run_file in run_files.all_of(layout.runs)]
    used = {Path(argv[0]).parent.parent for argv in commands if argv}
    return used | {Path(base) for venv in used if (base := noted_of(venv).get("base"))}


def _remove(venv: Venv) -> Pruned | None:
    """Remove the environment; None when a launch has begun to use it."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(venv.path.with_name(f"{venv.path.name}.lock"), timeout=0, mode=0o600):
            if not _take_away(venv):
                return None
            freed = _freed_bytes(venv.path)
            shutil.rmtree(venv.path, ignore_errors=True)
    except Timeout:
        return None
    return Pruned(*venv, freed)


def _take_away(venv: Venv) -> bool:
    """Take the environment away from launches; false when one has used it since it was chosen."""
    complete, going = venv.path / COMPLETE, venv.path / _GOING
    if not complete.exists():  # half made and abandoned: we have the lock
        return venv.path.exists()
    complete.rename(going)
    if going.stat().st_mtime == venv.used_at:
        return True
    going.rename(complete)
    return False


def _freed_bytes(folder: Path) -> int:
    """What its removal gives back: not what uv's cache holds as well, by links."""
    freed = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = Path(parent, name).lstat()
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                    freed += found.st_blocks * _BLOCK_BYTES
    return freed
