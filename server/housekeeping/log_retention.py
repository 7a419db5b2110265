# SPDX-License-Identifier: Apache-2.0
"""Which logs go: those that are too old, and the oldest once all together are too large.

Of requests the age is the database's business, whose rows go first (`dispatcher.py`). What still
runs keeps its log, which is bounded while it is written (`system.log_files`); it counts, though.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..settings import Paths


class Log(NamedTuple):
    """One file. `written_at` is when it last was."""

    path: Path
    size_bytes: int
    written_at: float
    is_of_request: bool


def logs_of(paths: Paths) -> Iterator[Log]:
    """All there are."""
    for pattern, folder in (("*.log", paths.request_logs), ("*/*.log", paths.environment_logs)):
        for path in folder.glob(pattern):
            try:
                found = path.stat()
            except OSError:  # it went meanwhile
                continue
            is_of_request = folder == paths.request_logs
            yield Log(path, found.st_size, found.st_mtime, is_of_request)


def to_remove(
    logs: Iterable[Log], running: Container[str], *, oldest: float, most_bytes: int
) -> list[Path]:
    """The files to remove. `running` holds the ids of requests and replicas that do."""
    by_age = sorted(logs, key=lambda log: log.written_at)
    total = sum(log.size_bytes for log in by_age)
    removed = []
    for log in by_age:
        if log.path.stem in running:
            continue
        too_old = log.written_at < oldest and not log.is_of_request
        if too_old or total > most_bytes:
            removed.append(log.path)
            total -= log.size_bytes
    return removed
