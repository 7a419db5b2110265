# SPDX-License-Identifier: Apache-2.0
"""How workers come to be: the source in use (as a rule a zygote), and what to do when it fails.

    ask_for_workers ──▶ source ──▶ Forked, Exited ──▶ the parent (the supervisor)
                          │
                          ├ Refused, or its end ──▶ again after a back-off; after some failures
                          │                         without preloading; in the end the parent is
                          │                         told that nothing can be started
                          ├ Unsafe ──▶ from then on workers are spawned
                          └ silence ──▶ as its end

Used by the supervisor thread alone. What becomes of the workers of a source that was lost is the
parent's business.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from typing import Protocol

from ...processes.resources.memory import anonymous_bytes
from ..policy.scaling import FAILED_STARTS_BEFORE_BARE, MOST_FAILED_STARTS, back_off_seconds
from ..spawning.source import (
    Exited,
    Forked,
    Ready,
    Refused,
    SourceEvent,
    SourceFactory,
    Unsafe,
    WorkerSource,
)
from . import process_trees
from .pool import Pool, PooledWorker, Pools
from .wakeup import Alarm

log = logging.getLogger(__name__)

_SOURCE_SECONDS = 2.0  # for the zygote to end
# Without a word of a zygote that was asked for workers, or is starting: it hangs, or somebody has
# stopped it. Far more than a preload takes on a machine that is busy.
SILENCE_SECONDS = 30.0


class Parent(Protocol):
    """Who hears of births and deaths."""

    @property
    def is_stopping(self) -> bool:
        """Whether nobody is wanted any more."""

    def on_born(self, worker: PooledWorker) -> None:
        """A worker exists, and is on no books yet."""

    def on_exited(self, exited: Exited) -> None:
        """A worker of the present source was reaped."""

    def on_source_lost(self) -> None:
        """Nobody will tell how the workers of the last source end."""

    def on_no_births(self, why: str) -> None:
        """Nothing can be started, it seems."""


class Births:
    """Owns the source."""

    def __init__(
        self,
        pools: Pools,
        alarm: Alarm,
        selector: selectors.BaseSelector,
        make_source: SourceFactory,
        parent: Parent,
    ) -> None:
        self._pools = pools
        self._alarm = alarm
        self._selector = selector
        self._make_source = make_source
        self._parent = parent
        self._source: WorkerSource | None = None
        self._may_fork = True
        self._failed_starts = 0
        self._next_start = 0.0
        self._answer_by = math.inf  # finite while the source owes us a word
        self.source_number = 0  # which of them is in use; none, right after one was lost

    @property
    def is_over(self) -> bool:
        """Whether nobody is wanted any more."""
        return self._parent.is_stopping

    def start(self) -> None:
        """Start a source.

        Raises:
            OSError: the zygote's program cannot be started at all.
        """
        self.source_number += 1
        may_preload = self._failed_starts < FAILED_STARTS_BEFORE_BARE
        self._source = self._make_source(may_preload, self._may_fork)
        self._selector.register(self._source.fileno(), selectors.EVENT_READ, self._on_source)

    def ask_for_workers(self) -> None:
        """For those that are wanted, unless a failure is too recent."""
        if self.is_over or time.monotonic() < self._next_start:
            return
        if self._source is None:
            self._restart()
        if self._source is None:
            return
        for pool in self._pools.by_schedule.values():
            for ordinal in self._ordinals_wanted(pool):
                self._source.ask(f"{pool.schedule.lower()}-{ordinal}")
        self._expect_answer()

    def ask_how_it_died(self, pid: int) -> None:
        """Have the source tell; a zygote does so unasked."""
        if self._source is not None:
            self._source.noticed_death(pid)

    def act_on_silence(self, now: float) -> None:
        """Give up a source that owes us a word for too long."""
        if now >= self._answer_by:
            self._on_lost(f"the zygote has said nothing for {SILENCE_SECONDS:.0f} s", 0.0)

    def deadline(self, now: float) -> float:
        """When to act, or to ask again."""
        next_start = self._next_start if self._next_start > now else math.inf
        return min(next_start, self._answer_by)

    def count_success(self) -> None:
        """A worker has done something."""
        self._failed_starts = 0

    def count_failure(self, why: str) -> None:
        """A source, or a worker before its first task, has failed."""
        self._failed_starts += 1
        self._next_start = time.monotonic() + back_off_seconds(self._failed_starts)
        self._alarm.set(self._next_start)
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._parent.on_no_births(why)

    def close(self, grace_seconds: float = _SOURCE_SECONDS) -> None:
        """End the source; its workers are not its concern."""
        self._answer_by = math.inf
        if self._source is not None:
            self._selector.unregister(self._source.fileno())
            self._source.close(grace_seconds)
            self._source = None

    def _on_source(self) -> None:
        if self._source is None:
            return
        events = self._source.read()
        if events is None:
            self._on_lost("the zygote died", _SOURCE_SECONDS)
            return
        for event in events:
            self._on_event(event)
        self._answer_by = math.inf
        self._expect_answer()

    def _expect_answer(self) -> None:
        """While workers are asked for, the source has to say something in time."""
        if self._answer_by == math.inf and any(p.asked for p in self._pools.by_schedule.values()):
            self._answer_by = time.monotonic() + SILENCE_SECONDS
            self._alarm.set(self._answer_by)

    def _on_event(self, event: SourceEvent) -> None:
        match event:
            case Forked():
                self._parent.on_born(_newcomer(event, self._pools, self.source_number))
            case Exited():
                self._parent.on_exited(event)
            case Refused():
                self._pools.named(event.name).asked.discard(_ordinal_of(event.name))
                self.count_failure(f"no process for worker {event.name}: {event.error}")
            case Unsafe():
                log.warning("the zygote has %d threads, and must not fork", event.threads)
                self._may_fork = False
            case Ready():
                log.info("the zygote is ready after %.0f ms", event.seconds * 1000)

    def _on_lost(self, why: str, grace_seconds: float) -> None:
        self.close(grace_seconds)
        with self._pools.lock:
            for pool in self._pools.by_schedule.values():
                pool.asked.clear()
        if not self.is_over:
            self.count_failure(why)
            log.warning("%s; starting another", why)
        self.source_number += 1
        self._parent.on_source_lost()

    def _restart(self) -> None:
        try:
            self.start()
        except OSError as exc:
            self.count_failure(f"the zygote cannot be started: {exc}")

    def _ordinals_wanted(self, pool: Pool) -> list[int]:
        with self._pools.lock:
            ordinals = []
            for _ in range(pool.wanted()):
                ordinals.append(pool.next_ordinal())
                pool.asked.add(ordinals[-1])
        return ordinals


def _newcomer(forked: Forked, pools: Pools, source_number: int) -> PooledWorker:
    pool, ordinal = pools.named(forked.name), _ordinal_of(forked.name)
    return PooledWorker(
        name=forked.name,
        schedule=pool.schedule,
        ordinal=ordinal,
        guaranteed=ordinal <= pool.guaranteed,
        pid=forked.pid,
        started_at=process_trees.started_at(forked.pid),
        pipe=forked.pipe,
        sentinel=forked.sentinel,
        source_number=source_number,
        born=time.monotonic(),
        born_bytes=anonymous_bytes(forked.pid),
    )


def _ordinal_of(worker_name: str) -> int:
    """3 of `long-3`."""
    return int(worker_name.rpartition("-")[2])
