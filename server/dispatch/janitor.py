# SPDX-License-Identifier: Apache-2.0
"""`Janitor`: keeps logs bounded, and removes what is older than the settings say.

    every 2 s while a LONG request runs     its log is cut to its newest half when it is too long
    every 10 minutes                        ended requests, environments, memory estimates, logs

Owns the two deadlines. The dispatcher's thread calls it, because that thread knows what runs.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from ...requests_db.dispatch_store import DispatchStore
from ...system.log_files import keep_newest_half
from ...system.units import MB
from ..housekeeping.log_retention import logs_of, to_remove
from ..settings import Paths, Settings
from .running import RunningRequests, Timing

SECONDS_PER_DAY = 86_400


class Janitor:
    """Cuts and collects."""

    def __init__(
        self,
        store: DispatchStore,
        running: RunningRequests,
        paths: Paths,
        settings: Settings,
        timing: Timing,
    ) -> None:
        self._store = store
        self._running = running
        self._paths = paths
        self._settings = settings
        self._timing = timing
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
        if not self._running.long:
            self._bound_logs_at = math.inf
        elif self._bound_logs_at == math.inf:
            self._bound_logs_at = now + self._timing.bound_logs_seconds
        elif now >= self._bound_logs_at:
            self._bound_logs_at = now + self._timing.bound_logs_seconds
            for request_id in self._running.long:
                self._bound_log(self._paths.request_log(request_id))

    def _bound_log(self, path: Path) -> None:
        limit = self._settings.max_log_mb * MB
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


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):  # it has gone, or has to stay
            path.unlink()
