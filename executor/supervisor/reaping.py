# SPDX-License-Identifier: Apache-2.0
"""How a worker's death is noticed, and what is done then.

    sentinel readable ──▶ DEAD, and the source is asked how ──▶ on_exited ──┐
    end of its pipe ──▶ asked too, where there is no sentinel               ├──▶ bury
    _STATUS_SECONDS without an answer, or its source is gone ───────────────┘

A burial hears the last words, ends what the worker left behind, takes it off the books, tells the
end of its task (the reason is `deaths.py`'s), and closes its descriptors, in this order: what it
had already sent counts, and nothing of it is left when its task's end is told.

The supervisor thread's; it takes the pools' lock for the books alone.
"""

from __future__ import annotations

import logging
import time

from ..messages import SHORT
from ..spawning.source import Exited
from ..worker.task_log import scratch_path, settle
from . import outcomes, process_trees
from .channels import Wires
from .event_buffer import Outbox
from .pool import PooledWorker, Pools, Run, Stage
from .starting import Births
from .stopping import LEAVE_SECONDS
from .wakeup import Alarm
from .worker_cgroups import WorkerCgroups

log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0  # between a worker's death and the zygote's word of how


class Burials:
    """Takes the dead off the books."""

    def __init__(
        self,
        pools: Pools,
        alarm: Alarm,
        births: Births,
        wires: Wires,
        cgroups: WorkerCgroups,
        outbox: Outbox,
        log_tail_lines: int,
    ) -> None:
        self._pools = pools
        self._alarm = alarm
        self._births = births
        self._wires = wires
        self._cgroups = cgroups
        self._outbox = outbox
        self._log_tail_lines = log_tail_lines

    def on_pipe_end(self, worker: PooledWorker) -> None:
        """It has died, which the sentinel tells, or it has closed its pipe and lives."""
        if worker.stage is Stage.DEAD:
            return
        if worker.sentinel is None:
            self._births.ask_how_it_died(worker.pid)
        if worker.stage is not Stage.KILLED:
            worker.deadline = min(worker.deadline, time.monotonic() + LEAVE_SECONDS)
            self._alarm.set(worker.deadline)

    def on_death(self, worker: PooledWorker) -> None:
        """It is dead; who reaped it will tell how."""
        self._mark_dead(worker)
        if worker.source_number != self._births.source_number:
            self.bury(worker)  # its zygote is gone: nobody will
            return
        self._alarm.set(worker.deadline)
        self._births.ask_how_it_died(worker.pid)

    def on_exited(self, exited: Exited) -> None:
        """Its status is known: bury it."""
        for worker in self._pools.workers():
            if worker.pid == exited.pid and worker.source_number == self._births.source_number:
                worker.exited = exited
                self.bury(worker)
                return

    def bury(self, worker: PooledWorker) -> None:
        """Hear its last words, end what it left, tell how it died, take it off the books."""
        self._mark_dead(worker)
        self._wires.hear_the_rest(worker)
        left = process_trees.end_survivors(worker)
        cgroup = self._cgroups.reading(worker, always=worker.run is not None)
        run = self._strike_off(worker)
        _settle_log(worker, run)
        if run is not None:
            self._outbox.add(outcomes.death(worker, run, cgroup, self._log_tail_lines))
            self._outbox.add_room(worker.schedule)
        elif worker.died_idle and worker.tasks_run == 0:
            self._births.count_failure(f"worker {worker.name} died before its first task")
        if left:
            log.info("worker %s left processes %s, which were ended", worker.name, left)
        self._wires.disconnect(worker)

    def _mark_dead(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            if worker.stage is not Stage.DEAD:
                worker.died_idle = worker.stage is Stage.IDLE
                told_by = time.monotonic() + _STATUS_SECONDS
                self._pools.of(worker).enter(worker, Stage.DEAD, deadline=told_by)

    def _strike_off(self, worker: PooledWorker) -> Run | None:
        """Take it off the books, and the task that it died under."""
        with self._pools.lock:
            pool = self._pools.of(worker)
            run = pool.unassign(worker)
            pool.remove(worker)
            if run is not None:
                self._pools.forget(run)
        return run


def _settle_log(worker: PooledWorker, run: Run | None) -> None:
    if worker.schedule == SHORT and worker.log_path:
        scratch = scratch_path(worker.log_path, worker.name, worker.pid)
        settle(scratch, None if run is None else run.task.log_path)
