# SPDX-License-Identifier: Apache-2.0
"""`Janitor`: keeps logs bounded, and removes what is older than the settings say.

    every 2 s while a LONG request runs     its log is cut to its newest half when it is too long
    every 10 minutes, in short steps        ended requests, environments, memory estimates; logs:
                                            with their requests and environments, or the oldest
                                            while all are too large together

A request or replica that runs keeps its log, which counts towards the total. Ages are measured by
monotonic time and event numbers, because a wall clock may step. Owns the two deadlines. The
dispatcher's thread calls it, because that thread knows what runs.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...requests_db.transactions import retention
from ...schema.settings import Paths
from ...system.files.log_files import TIMES_SUFFIX, BoundedLog
from ...system.text.units import MB
from .running import DispatchContext

SECONDS_PER_DAY = 86_400
PAUSE_SECONDS = 0.01  # between two steps of a collection, for other writers


class Log(NamedTuple):
    """One file, of a request or of a replica."""

    path: Path
    size_bytes: int
    request_id: str  # the request; of a replica, its launch


class Janitor:
    """Cuts long logs, and removes old rows and files."""

    def __init__(self, context: DispatchContext) -> None:
        self._store = context.store
        self._running = context.running
        self._paths = context.paths
        self._settings = context.settings
        self._timing = context.timing
        self._collect_at = self._noted_at = time.monotonic()
        self._bound_logs_at = math.inf
        self._logs: dict[str, BoundedLog] = {}  # of the LONG requests that run
        self._steps: Iterator[None] | None = None  # of a collection that is under way

    def due_at(self) -> float:
        """Return when `tidy` has something to do, on the monotonic clock."""
        return min(self._collect_at, self._bound_logs_at)

    def tidy(self) -> None:
        """Do what is due; after a `DatabaseError` the next collection repeats it."""
        now = time.monotonic()
        self._bound_logs(now)
        if now >= self._collect_at:
            self._collect_at = now + self._timing.collect_seconds
            steps = self._steps or self._collect(now)
            self._steps = None  # if the step fails
            for _ in steps:
                self._steps, self._collect_at = steps, time.monotonic() + PAUSE_SECONDS
                break

    def _bound_logs(self, now: float) -> None:
        """Cut the logs of LONG requests that have grown too long; other requests are short."""
        is_due = now >= self._bound_logs_at
        if not self._running.long:
            self._bound_logs_at = math.inf
        elif is_due or self._bound_logs_at == math.inf:
            self._bound_logs_at = now + self._timing.bound_logs_seconds
        if not is_due:
            return
        limit = self._settings.max_log_mb * MB
        self._logs = {
            each: self._logs.get(each) or BoundedLog(str(self._paths.request_log(each)), limit)
            for each in self._running.long
        }
        for log in self._logs.values():
            log.bound()

    def _collect(self, now: float) -> Iterator[None]:
        """Remove what is old, in steps that each take some milliseconds."""
        keep_seconds = self._settings.keep_days * SECONDS_PER_DAY
        old_event = self._store.write(retention.note_time, now - self._noted_at, keep_seconds)
        self._noted_at = now
        ended: set[str] = set()
        for removed in retention.collect(self._store, old_event, self._settings.keep_requests):
            _remove(self._paths.request_log(request_id) for request_id in removed)
            ended.update(removed)
            yield
        ages = retention.Ages(self._store)
        yield from ages.read()
        for names in ages.collect_environments(old_event):
            for name in names:
                shutil.rmtree(self._paths.environment_logs / name, ignore_errors=True)
            yield
        yield from self._collect_logs(ages, ended)

    def _collect_logs(self, ages: retention.Ages, ended: set[str]) -> Iterator[None]:
        logs = list(logs_of(self._paths))  # first: what starts from now on is not among them
        most_bytes = self._settings.max_logs_mb * MB
        if not ended and sum(log.size_bytes for log in logs) <= most_bytes:
            return
        last_events: dict[str, int] = {}
        for found in ages.of_logs(sorted({log.request_id for log in logs})):
            last_events |= found
            yield
        with contextlib.suppress(OSError):
            replicas = {path.name for path in self._paths.runs.iterdir()}
            running = self._running.keys() | replicas
            _remove(to_remove(logs, running, ended, last_events, most_bytes=most_bytes))


def logs_of(paths: Paths) -> Iterator[Log]:
    """Find the logs of all requests and replicas."""
    for pattern, folder in (("*.log", paths.request_logs), ("*/*.log", paths.environment_logs)):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                yield Log(path, path.stat().st_size, path.stem.rpartition("-")[2])


def to_remove(
    logs: Iterable[Log],
    running: Container[str],
    ended: Container[str],
    last_events: Mapping[str, int],
    *,
    most_bytes: int,
) -> list[Path]:
    """Choose the logs to remove: of `ended` requests, and the oldest, but of nothing `running`.

    `ended` requests were removed from the database; their logs are removed, unless the environment
    that a request launched is still known. `last_events` has the last event of each request, or of
    the environment that it launched; `most_bytes` is the most that all logs together may have.
    """
    by_age = sorted(logs, key=lambda log: last_events.get(log.request_id, 0))
    total = sum(log.size_bytes for log in by_age)
    removed = []
    for log in by_age:
        too_old = log.request_id in ended and log.request_id not in last_events
        if log.path.stem not in running and (too_old or total > most_bytes):
            removed.append(log.path)
            total -= log.size_bytes
    return removed


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        for each in (path, path.with_name(path.name + TIMES_SUFFIX)):
            with contextlib.suppress(OSError):  # it has gone, or has to stay
                each.unlink()
