# SPDX-License-Identifier: Apache-2.0
"""What is looked at while workers have tasks: who exceeds a cap that no cgroup enforces
(`watchdog.py` decides), and what the others' cgroups have counted (`worker_cgroups.py` notes).

Nothing is looked at while nobody has a task. The supervisor thread looks; who hands a task over,
on any thread, says so under the pools' lock.
"""

from __future__ import annotations

import logging
import math

from ...processes.resources.limits import available_memory_bytes
from ...processes.resources.memory import tree_bytes
from ..policy.memory_caps import WATCH_SECONDS, Usage, offence_of
from ..policy.plan import Plan
from . import outcomes
from .pool import PooledWorker, Pools
from .wakeup import Alarm
from .worker_cgroups import LOOK_SECONDS, WorkerCgroups

log = logging.getLogger(__name__)


class MemoryWatch:
    """When to look at which, and looking."""

    def __init__(self, pools: Pools, alarm: Alarm, cgroups: WorkerCgroups, plan: Plan) -> None:
        self._pools = pools
        self._alarm = alarm
        self._cgroups = cgroups
        self._plan = plan
        # Both under the pools' lock, and infinite while there is nothing to look at.
        self._watch_at = math.inf  # workers without a cgroup
        self._look_at = math.inf  # at the cgroups of the others
        self._was_busy = False  # one of the latter, at the last look or since

    def note_busy(self, worker: PooledWorker, now: float) -> None:
        """A worker gets a task. Under the pools' lock."""
        if worker.cgroup is None and self._watch_at == math.inf:
            self._watch_at = now + WATCH_SECONDS
            self._alarm.set(self._watch_at)
        if worker.cgroup is not None and self._look_at == math.inf:
            self._look_at, self._was_busy = now + LOOK_SECONDS, True
            self._alarm.set(self._look_at)

    def deadline(self) -> float:
        """When to look again."""
        return min(self._watch_at, self._look_at)

    def look_when_due(self, now: float) -> PooledWorker | None:
        """The worker that is to be ended, with its `offence`."""
        if now >= self._look_at:
            self._look_at_cgroups(now)
        return self._offender(now) if now >= self._watch_at else None

    def _look_at_cgroups(self, now: float) -> None:
        """Note what was counted; twice more after the last task, so that it is no later one's."""
        workers = self._pools.workers()
        self._cgroups.look(workers, outcomes.machine_oom_kills())
        with self._pools.lock:
            is_busy = any(worker.run is not None for worker in workers)
            self._look_at = now + LOOK_SECONDS if is_busy or self._was_busy else math.inf
            self._was_busy = is_busy

    def _offender(self, now: float) -> PooledWorker | None:
        """The largest of those that exceed their caps and have no cgroup to hold them."""
        with self._pools.lock:
            watched = {
                worker.name: worker
                for worker in self._pools.workers()
                if worker.cgroup is None and worker.run is not None and worker.offence is None
            }
            limits = {
                worker.name: worker.run.task.memory_bytes or self._plan.worker_bytes
                for worker in watched.values()
                if worker.run is not None
            }
            self._watch_at = now + WATCH_SECONDS if watched else math.inf
        usages = [
            Usage(name, tree_bytes(worker.pid, worker.born_bytes), limits[name])
            for name, worker in watched.items()
        ]
        offence = offence_of(
            usages,
            available_bytes=available_memory_bytes() if usages else 0,
            reserve_bytes=self._plan.reserve_bytes,
        )
        if offence is None:
            return None
        log.warning("worker %s is ended: %s", offence.name, offence.evidence)
        watched[offence.name].offence = offence
        return watched[offence.name]
