# SPDX-License-Identifier: Apache-2.0
"""Starts workers: the source in use (as a rule a zygote), and what happens when it fails.

    request_workers ──▶ source ──▶ Forked, Exited ──▶ `read` returns them
                          │
                          ├ Refused, or its end ──▶ again after a back-off; after some failures
                          │                         without preloading; in the end waiting tasks
                          │                         fail
                          ├ Unsafe ──▶ from then on workers are spawned
                          └ silence ──▶ as its end

Used by the supervisor thread alone, but for `zygote_pid`. The fate of workers of a lost
source is decided in `lifecycle.py`.
"""

from __future__ import annotations

import itertools
import logging
import math
import selectors
import time
from dataclasses import dataclass

from ...system.memory.usage import anonymous_bytes
from ...system.process.process_identity import ProcessIdentity
from ..policy.memory import Timing
from ..policy.plan import FAILED_STARTS_BEFORE_BARE, MAX_FAILED_STARTS, back_off_seconds
from ..spawning.source import Exited, Forked, Ready, Refused, SourceFactory, Unsafe, WorkerSource
from .channels import Handler, WakeUp
from .pool import PooledWorker, Pools
from .tasks import Tasks

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class WorkerStarter:
    """Owns the source of workers, and the back-off between its restarts."""

    _pools: Pools
    _wake_up: WakeUp
    _selector: selectors.BaseSelector
    _make_source: SourceFactory
    _tasks: Tasks
    _timing: Timing
    _on_readable: Handler
    _source: WorkerSource | None = None
    _may_fork: bool = True
    _next_start: float = 0.0
    _answer_by: float = math.inf  # finite while the source owes an answer

    @property
    def zygote_pid(self) -> int | None:
        """The zygote's pid; None when there is none at the moment. Any thread."""
        source = self._source
        return None if source is None else source.pid

    def start(self) -> None:
        """Start a source.

        Raises:
            OSError: the zygote's program cannot be started at all.
        """
        self._pools.source_number += 1
        may_preload = self._pools.failed_starts < FAILED_STARTS_BEFORE_BARE
        self._source = self._make_source(may_preload, self._may_fork)
        self._selector.register(self._source.fileno(), selectors.EVENT_READ, self._on_readable)

    def request_workers(self) -> None:
        """Request the workers that are wanted, unless a failure is too recent."""
        if self._pools.is_stopping or time.monotonic() < self._next_start:
            return
        if self._source is None:
            try:
                self.start()
            except OSError as exc:
                self.count_failure(f"the zygote cannot be started: {exc}")
        if self._source is None:
            return
        for pool in self._pools.by_schedule.values():
            with self._pools.lock:
                ordinals = []
                for _ in range(pool.wanted()):
                    # The smallest that is free, so that guaranteed workers keep their names.
                    taken = pool.workers.keys() | pool.requested
                    ordinals.append(next(i for i in itertools.count(1) if i not in taken))
                    pool.requested.add(ordinals[-1])
            for ordinal in ordinals:
                self._source.request(f"{pool.schedule.lower()}-{ordinal}")
        self._expect_answer()

    def request_status(self, pid: int) -> None:
        """Have the source reap a worker that has exited; a zygote does so by itself."""
        if self._source is not None:
            self._source.noticed_exit(pid)

    def read(self) -> list[PooledWorker | Exited] | None:
        """Return workers that have started, and exits; None when the source is lost."""
        if self._source is None:
            return []
        events = self._source.read()
        if events is None:
            self._lose("the zygote exited", self._timing.source_exit)
            return None
        news: list[PooledWorker | Exited] = []
        for event in events:
            match event:
                case Forked():
                    news.append(self._new_worker(event))
                case Exited():
                    news.append(event)
                case Refused():
                    self._pools.named(event.name).requested.discard(_ordinal_of(event.name))
                    self.count_failure(f"no process for worker {event.name}: {event.error}")
                case Unsafe():
                    log.warning("the zygote has %d threads, and must not fork", event.threads)
                    self._may_fork = False
                case Ready():
                    log.info("the zygote is ready after %.0f ms", event.seconds * 1000)
        self._answer_by = math.inf
        self._expect_answer()
        return news

    def give_up_if_silent(self, now: float) -> bool:
        """Replace a source that owes an answer for too long; whether it was."""
        if now < self._answer_by:
            return False
        self._lose(f"the zygote has not answered for {self._timing.source_silence:.0f} s", 0.0)
        return True

    def deadline(self, now: float) -> float:
        """Return when to act on silence, or to request workers again."""
        next_start = self._next_start if self._next_start > now else math.inf
        return min(next_start, self._answer_by)

    def count_failure(self, why: str) -> None:
        """Back off, since a source, or a worker before its first task, has failed."""
        failures = self._pools.failed_starts = self._pools.failed_starts + 1
        self._next_start = time.monotonic() + back_off_seconds(failures)
        self._wake_up.wake_by(self._next_start)
        if failures >= MAX_FAILED_STARTS:
            log.error("no worker can be started: %s", why)
            self._tasks.refuse_waiting(why, stopped=False)

    def close(self, grace_seconds: float) -> None:
        """End the source; its workers continue."""
        self._answer_by = math.inf
        if self._source is not None:
            self._selector.unregister(self._source.fileno())
            self._source.close(grace_seconds)
            self._source = None

    def _expect_answer(self) -> None:
        """While workers are requested, the source has to say something in time."""
        requested = any(pool.requested for pool in self._pools.by_schedule.values())
        if self._answer_by == math.inf and requested:
            self._answer_by = time.monotonic() + self._timing.source_silence
            self._wake_up.wake_by(self._answer_by)

    def _lose(self, why: str, grace_seconds: float) -> None:
        self.close(grace_seconds)
        for pool in self._pools.by_schedule.values():
            pool.requested.clear()
        if not self._pools.is_stopping:
            self.count_failure(why)
            log.warning("%s; starting another", why)
        self._pools.source_number += 1

    def _new_worker(self, forked: Forked) -> PooledWorker:
        pool, ordinal = self._pools.named(forked.name), _ordinal_of(forked.name)
        pool.requested.discard(ordinal)
        return PooledWorker(
            name=forked.name,
            schedule=pool.schedule,
            ordinal=ordinal,
            guaranteed=ordinal <= pool.guaranteed,
            pid=forked.pid,
            started_at=_started_at(forked.pid),
            pipe=forked.pipe,
            sentinel=forked.sentinel,
            source_number=self._pools.source_number,
            inherited_bytes=anonymous_bytes(forked.pid),
        )


def _started_at(pid: int) -> float:
    """With the pid, the identity of a process; 0 when it is gone already."""
    try:
        return ProcessIdentity.of(pid).started_at
    except ProcessLookupError:
        return 0.0


def _ordinal_of(worker_name: str) -> int:
    """3 of `long-3`."""
    return int(worker_name.rpartition("-")[2])
