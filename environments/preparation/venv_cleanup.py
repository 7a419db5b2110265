# SPDX-License-Identifier: Apache-2.0
"""Removes virtual environments of projects that nothing uses any more.

    used by a replica    a run file names its Python: it stays, and the one that it is laid over;
                         or its working folder, which is the checkout of a repository (`checkout`)
    a run file that      its replica may use any of them: all stay
    cannot be used
    used by a launch     the launch has marked it (`note_use`): it stays for a while
    being made           its lock is held: it stays
    half made            by a launch that was killed: it is removed
    anything else        `prune` removes it at once; the daemon, once it was unused for long

No wall clock is read, since it may step. A launch writes `used`, the second of this boot. The time
for which an environment is unused is counted while daemons run: the cleanup that first finds a
`used` writes `unused`, with that value and the time.

`complete` is renamed before a removal: a launch that does not find it waits for the lock, and makes
the environment again. Then `used` is read again, as a launch may have found it just before.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...schema.layout import Layout
from ...system.process.process_identity import boot_seconds
from .. import run_files
from ..shim.files import read_json
from .project_venv import CHECKOUT, COMPLETE, USED, note_use, noted_of

LAUNCH_SECONDS = 60.0  # from a launch's use of an environment until its run file is written
INSTALL_SECONDS = 3600.0  # the same for a checkout, whose dependencies are installed meanwhile
UNUSED = "unused"  # JSON: the content of `used`, and since when daemons have found it so
_GOING = f"{COMPLETE}.going"
_BLOCK_BYTES = 512  # the unit of `st_blocks` on every file system


class Venv(NamedTuple):
    """A virtual environment."""

    path: Path
    project: str | None  # the folder it was made for, if that is known
    used: str  # the text that its last use has written
    freed_bytes: int = 0  # by its removal

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {"path": str(self.path), "project": self.project, "freed_bytes": self.freed_bytes}


def prune(layout: Layout) -> list[Venv]:
    """Remove the environments that nothing uses. Blocks."""
    return list(filter(None, map(_remove, _idle(layout))))


def prune_old(layout: Layout, run_seconds: float, keep_seconds: float) -> list[Venv]:
    """Remove environments that nothing has used for `keep_seconds`. Blocks.

    Only the time while daemons run counts; they have run for `run_seconds` so far.
    """
    old = [v for v in _idle(layout) if _unused_since(v, run_seconds) <= run_seconds - keep_seconds]
    return list(filter(None, map(_remove, old)))


def _idle(layout: Layout) -> list[Venv]:
    """Return the environments that no replica uses, and no launch has used lately."""
    if not (found := list(venvs_of(layout))):
        return []
    used = in_use(layout)
    for venv in found:
        if venv.path in used:
            note_use(venv.path)
    now = boot_seconds()
    return [v for v in found if v.path not in used and not is_launching(v, now)]


def is_launching(venv: Venv, now: float) -> bool:
    """Return whether the run file of the launch that wrote `used` may still be written."""
    seconds = INSTALL_SECONDS if venv.path.name.startswith(CHECKOUT) else LAUNCH_SECONDS
    try:
        return abs(now - float(venv.used)) <= seconds
    except ValueError:  # it is missing, or being written, which `_take_away` notices
        return False


def _unused_since(venv: Venv, run_seconds: float) -> float:
    """Return how long daemons had run when a cleanup first saw that there was no later use."""
    if not (venv.path / COMPLETE).exists():
        return -math.inf
    path = venv.path / UNUSED
    match read_json(path):
        # A time in the future was counted by a database that is lost.
        case {"used": venv.used, "since": int() | float() as since} if since <= run_seconds:
            return float(since)
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"used": venv.used, "since": run_seconds}))
    return run_seconds


def venvs_of(layout: Layout) -> Iterator[Venv]:
    """Yield all environments."""
    for path in layout.venvs.glob("*/"):
        yield Venv(path, noted_of(path).get("project"), _use_of(path))


def _use_of(path: Path) -> str:
    """Return the text that the last use has written; empty: there was no use."""
    with contextlib.suppress(OSError):
        return (path / USED).read_text()
    return ""


def in_use(layout: Layout) -> set[Path]:
    """Return the environments whose Python a replica runs, or will be restarted with."""
    usable, aside = run_files.look(layout.runs)
    if aside:
        return {venv.path for venv in venvs_of(layout)}
    found = [run_file.data for run_file in usable]
    # The command of a shim, or of an engine that runs programs.
    commands = [data.get("argv") or (data.get("plan") or {}).get("command") for data in found]
    used = {Path(argv[0]).parent.parent for argv in commands if argv}
    folders = {data.get("cwd") or (data.get("plan") or {}).get("folder", "/") for data in found}
    parents = {parent for folder in folders for parent in Path(folder).resolve().parents}
    home = layout.venvs.resolve()
    used |= {layout.venvs / parent.name for parent in parents if parent.parent == home}
    return used | {Path(base) for venv in used if (base := noted_of(venv).get("base"))}


def _remove(venv: Venv) -> Venv | None:
    """Remove an environment and return it; None: a launch has begun to use it."""
    from filelock import FileLock, Timeout

    lock = FileLock(venv.path.with_name(f"{venv.path.name}.lock"), timeout=0, mode=0o600)
    with contextlib.suppress(Timeout), lock:
        if _take_away(venv):
            freed = _freed_bytes(venv.path)
            shutil.rmtree(venv.path, ignore_errors=True)
            return venv._replace(freed_bytes=freed)
    return None


def _take_away(venv: Venv) -> bool:
    """Hide an environment from launches; return False if one has used it since it was chosen."""
    complete, going = venv.path / COMPLETE, venv.path / _GOING
    if not complete.exists():  # it is half made and abandoned, since we have its lock
        return venv.path.exists()
    complete.rename(going)
    if _use_of(venv.path) == venv.used:
        return True
    going.rename(complete)
    return False


def _freed_bytes(folder: Path) -> int:
    """Return how much space the removal frees, without files that uv's cache links to as well."""
    freed = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = Path(parent, name).lstat()
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                    freed += found.st_blocks * _BLOCK_BYTES
    return freed
