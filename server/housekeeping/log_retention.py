# SPDX-License-Identifier: Apache-2.0
"""Which logs are removed: those that are too old, and the oldest while all are too large together.

The age of a request's log is the database's business, whose rows are removed first
(`dispatch/janitor.py`). A request or replica that runs keeps its log, which is bounded while it is
written (`system.log_files`) and counts towards the total.
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
    """Find the logs of all requests and replicas."""
    for pattern, folder in (("*.log", paths.request_logs), ("*/*.log", paths.environment_logs)):
        for path in folder.glob(pattern):
            try:
                found = path.stat()
            except OSError:  # it was removed meanwhile
                continue
            is_of_request = folder == paths.request_logs
            yield Log(path, found.st_size, found.st_mtime, is_of_request)


def to_remove(
    logs: Iterable[Log], running: Container[str], *, oldest: float, most_bytes: int
) -> list[Path]:
    """Choose the files to remove.

    Args:
        logs: all there are.
        running: the ids of requests and replicas that run.
        oldest: epoch seconds; logs of replicas that were written before are removed.
        most_bytes: the most that all logs together may have.
    """
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
