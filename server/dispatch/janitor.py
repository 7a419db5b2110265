# SPDX-License-Identifier: Apache-2.0
"""`Janitor`: keeps logs bounded, and removes what is older than the settings say.

    every 2 s while a LONG request runs     its log is cut to its newest half when it is too long
    every 10 minutes                        ended requests, environments, memory estimates; logs:
                                            too old, or the oldest while all are too large together

A request or replica that runs keeps its log, which counts towards the total. Owns the two
deadlines. The dispatcher's thread calls it, because that thread knows what runs.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...system.log_files import keep_newest_half
from ...system.units import MB
from ..settings import Paths
from .running import DispatchContext

SECONDS_PER_DAY = 86_400


class Log(NamedTuple):
    """One file. `written_at` is when it last was."""

    path: Path
    size_bytes: int
    written_at: float
    is_of_request: bool  # the database says how long it is kept


class Janitor:
    """Cuts long logs, and removes old rows and files."""

    def __init__(self, context: DispatchContext) -> None:
        self._store = context.store
        self._running = context.running
        self._paths = context.paths
        self._settings = context.settings
        self._timing = context.timing
        self._collect_at = time.monotonic()
        self._bound_logs_at = math.inf

    def due_at(self) -> float:
        """When `tidy` has something to do, on the monotonic clock."""
        return min(self._collect_at, self._bound_logs_at)

    def tidy(self) -> None:
        """Do what is due.

        Raises:
            DatabaseError: tried again when the next collection is due.
        """
        now = time.monotonic()
        self._bound_logs(now)
        if now >= self._collect_at:
            self._collect_at = now + self._timing.collect_seconds
            self._collect()

    def _bound_logs(self, now: float) -> None:
        """Cut the logs that have grown too long; of LONG requests only: others end too soon."""
        is_due = now >= self._bound_logs_at
        if not self._running.long:
            self._bound_logs_at = math.inf
        elif is_due or self._bound_logs_at == math.inf:
            self._bound_logs_at = now + self._timing.bound_logs_seconds
        if not is_due:
            return
        limit = self._settings.max_log_mb * MB
        for request_id in self._running.long:
            path = self._paths.request_log(request_id)
            with contextlib.suppress(OSError):
                if path.stat().st_size > limit:
                    keep_newest_half(str(path), limit)

    def _collect(self) -> None:
        keep_seconds = self._settings.keep_days * SECONDS_PER_DAY
        removed = self._store.collect(time.time(), self._settings.keep_requests, keep_seconds)
        _remove(self._paths.request_log(request_id) for request_id in removed)
        for name in self._store.collect_environments(time.time(), keep_seconds):
            shutil.rmtree(self._paths.environment_logs / name, ignore_errors=True)
        self._collect_logs(time.time() - keep_seconds)

    def _collect_logs(self, oldest: float) -> None:
        logs = list(logs_of(self._paths))  # first: what starts from now on is not among them
        with contextlib.suppress(OSError):
            replicas = {path.name for path in self._paths.runs.iterdir()}
            most_bytes = self._settings.max_logs_mb * MB
            running = self._running.keys() | replicas
            _remove(to_remove(logs, running, oldest=oldest, most_bytes=most_bytes))


def logs_of(paths: Paths) -> Iterator[Log]:
    """Find the logs of all requests and replicas."""
    for pattern, folder in (("*.log", paths.request_logs), ("*/*.log", paths.environment_logs)):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                found = path.stat()
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
        too_old = log.written_at < oldest and not log.is_of_request
        if log.path.stem not in running and (too_old or total > most_bytes):
            removed.append(log.path)
            total -= log.size_bytes
    return removed


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):  # it has gone, or has to stay
            path.unlink()
