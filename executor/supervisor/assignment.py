# SPDX-License-Identifier: Apache-2.0
"""How a task gets to a worker, or is told that it never will.

    submit, on any thread ─────────────────────────────────▶ hand_over ──▶ the worker's pipe
    a worker is born, or free again ──▶ employ ──┬─ a task waits ──▲
                                                 └─ none ──▶ IDLE, for `BURST_IDLE_SECONDS` if it is
                                                             not to be kept
    nothing can be started, or the executor stops ──▶ refuse_waiting

The pools' lock: `hand_over` and `employ` find it taken, `refuse_waiting` takes it. The last two are
the supervisor thread's.
"""

from __future__ import annotations

import math
import time

from ..messages import LONG, Started
from ..policy.scaling import BURST_IDLE_SECONDS
from . import outcomes
from .channels import Wires
from .event_buffer import Outbox
from .memory_watch import MemoryWatch
from .pool import Pool, PooledWorker, Pools, Run, Stage
from .wakeup import Alarm
from .worker_cgroups import WorkerCgroups


class Handover:
    """Hands tasks to workers."""

    def __init__(
        self,
        pools: Pools,
        alarm: Alarm,
        wires: Wires,
        cgroups: WorkerCgroups,
        memory: MemoryWatch,
        outbox: Outbox,
    ) -> None:
        self._pools = pools
        self._alarm = alarm
        self._wires = wires
        self._cgroups = cgroups
        self._memory = memory
        self._outbox = outbox

    def employ(self, pool: Pool, worker: PooledWorker) -> None:
        """Give a free worker the next waiting task, or let it idle. Under the lock."""
        now = time.monotonic()
        if pool.waiting:
            self._outbox.add(self.hand_over(pool, worker, pool.waiting.popleft(), now))
            return
        idles_out = math.inf if worker.kept else now + BURST_IDLE_SECONDS
        pool.enter(worker, Stage.IDLE, deadline=idles_out)
        self._alarm.set(idles_out)

    def hand_over(self, pool: Pool, worker: PooledWorker, run: Run, now: float) -> Started:
        """Write the task into the worker's pipe. Any thread, under the lock."""
        started = Started(run.task.id, worker.name, worker.pid, worker.started_at, time.time())
        if run.task.memory_bytes is not None:
            self._cgroups.apply_limit(worker, run.task.memory_bytes)
        if worker.cgroup is None and run.task.schedule == LONG:
            # Too dear for SHORT tasks; where there are cgroups they tell better.
            run.machine_oom_kills = outcomes.machine_oom_kills()
        self._memory.note_busy(worker, now)
        if not pool.assign(worker, run, now):
            self._wires.unclog(worker)
        self._alarm.set(worker.deadline)
        return started

    def refuse_waiting(self, why: str, *, stopped: bool) -> None:
        """Tell the tasks that wait, rather than let them hang."""
        for run in self._take_waiting():
            self._outbox.add(outcomes.never_started(run, why, stopped=stopped))

    def _take_waiting(self) -> list[Run]:
        with self._pools.lock:
            taken: list[Run] = []
            for pool in self._pools.by_schedule.values():
                if pool.waiting:
                    self._outbox.add_room(pool.schedule)
                taken += pool.waiting
                pool.waiting.clear()
            for run in taken:
                self._pools.forget(run)
        return taken
