# SPDX-License-Identifier: Apache-2.0
"""Waits for changes of a project's files, for `openenv launch --watch`.

The folder is listed four times a second, with the folders that its links lead to, since no system
reports the changes of network folders and of containers' mounts. A change counts when nothing was
written for `QUIET_SECONDS`, so that the writes of a `git checkout` are one change. A project that
writes files into its own folder, other than those that are ignored here, is updated by them. The
folders of rollouts are ignored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..system.text.units import plural

POLL_INTERVAL_SECONDS = 0.25
QUIET_SECONDS = 0.4
MAX_SECONDS = 2.0  # a file that is written all the time keeps no other from being noticed
# They are not part of a project (`environments/sources`), or are written by tools and servers.
IGNORED = frozenset(
    {".git", ".venv", "venv", "__pycache__", "node_modules", ".pytest_cache", ".mypy_cache"}
    | {".ruff_cache", ".cache", "logs", "outputs", "runs", "wandb"}
)
IGNORED_ENDINGS = (
    *("~", ".log", ".tmp", ".swp", ".pyc"),
    *(".db", ".sqlite", "-wal", "-shm", "-journal"),
)

Files = dict[str, tuple[int, int]]  # the time of the last write and the size, by path


def files_below(folder: Path) -> Files:
    """Return the files of a project, except those that are not part of it."""
    return dict(_files(str(folder), set()))


def wait_for_change(folder: Path, known: Files) -> Files:
    """Wait until the folder differs from `known` and writing has stopped; return its files."""
    while (found := files_below(folder)) == known:
        time.sleep(POLL_INTERVAL_SECONDS)
    began = changed_at = time.monotonic()
    while (now := time.monotonic()) - changed_at < QUIET_SECONDS and now - began < MAX_SECONDS:
        time.sleep(POLL_INTERVAL_SECONDS)
        if (again := files_below(folder)) != found:
            found, changed_at = again, time.monotonic()
    return found


def describe_change(folder: Path, before: Files, after: Files) -> str:
    """Return the file that differs, and how many others do; empty if none does."""
    changed = sorted(path for path, _ in before.items() ^ after.items())
    names = list(dict.fromkeys(os.path.relpath(path, folder) for path in changed))
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} and {plural(len(names) - 1, 'other file')}"


def _files(folder: str, known: set[tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the files; `known` are folders that were listed, where links may lead again."""
    with suppress(OSError), os.scandir(folder) as entries:  # it may be removed meanwhile
        of_folder = os.stat(folder)  # noqa: PTH116  # a tenth of the time
        if (identity := (of_folder.st_dev, of_folder.st_ino)) in known:
            return
        known.add(identity)
        found = list(entries)
        if any(entry.name == "rollout.json" for entry in found):
            return
        for entry in found:
            if entry.name in IGNORED or entry.name.endswith(IGNORED_ENDINGS):
                continue
            if entry.is_dir():
                yield from _files(entry.path, known)
                continue
            with suppress(OSError):
                status = entry.stat()
                yield entry.path, (status.st_mtime_ns, status.st_size)
