# SPDX-License-Identifier: Apache-2.0
"""What becomes of what a worker says: progress is told, an outcome ends its task.

    frame ──▶ progress ──▶ Progressed
          └─▶ outcome ──▶ `deaths.conclusion` ──▶ the task's event
                      └─▶ the worker: the next task ──▶ `handover.py`
                                      or it must go ──▶ `dismissals.py`

A worker is not used again when it was told to stop, when it says itself that it must retire (it has
children or threads left), and for the reasons of `_why_leave`. A dead one's last words are heard at
its burial: its task ends by them, and nothing is left to be decided about the worker.

The supervisor thread's; it takes the pools' lock for the change of hands.
"""

from __future__ import annotations

import logging
import time

from ..messages import Died, ExecutorEvent, Progressed
from ..policy.scaling import reason_to_recycle
from . import outcomes
from .assignment import Handover
from .event_buffer import Outbox
from .pool import PooledWorker, Pools, Run, Stage
from .starting import Births
from .stopping import Dismissals
from .worker_cgroups import WorkerCgroups

log = logging.getLogger(__name__)


class Conclusions:
    """Ends tasks whose workers live."""

    def __init__(
        self,
        pools: Pools,
        births: Births,
        handover: Handover,
        dismissals: Dismissals,
        cgroups: WorkerCgroups,
        outbox: Outbox,
        log_tail_lines: int,
    ) -> None:
        self._pools = pools
        self._births = births
        self._handover = handover
        self._dismissals = dismissals
        self._cgroups = cgroups
        self._outbox = outbox
        self._log_tail_lines = log_tail_lines

    def on_frame(self, worker: PooledWorker, frame: outcomes.Frame) -> None:
        """The worker says something.

        Raises:
            KeyError, TypeError: it is not what a worker says.
        """
        run = worker.run
        if run is None or frame["task"] != run.task.id:
            return  # a thread that an operation left reports on a task that is over
        if frame["kind"] == "progress":
            self._outbox.add(Progressed(run.task.id, frame["data"], time.time()))
            return
        event = self._conclude(worker, run, frame)
        why_leave = frame["retire"] or self._why_leave(worker, event)
        if self._pass_on(worker, run, why_leave):
            return
        if frame["retire"]:  # what it has left behind would keep it from going
            self._dismissals.kill(worker)
        else:
            self._dismissals.see_off(worker)

    def _conclude(self, worker: PooledWorker, run: Run, frame: outcomes.Frame) -> ExecutorEvent:
        """Tell the outcome, and note what the task did to its worker."""
        cgroup = self._cgroups.reading(worker, always=frame["kind"] == "raised")
        event = outcomes.conclusion(worker, run, frame, cgroup, self._log_tail_lines)
        self._outbox.add(event)
        self._outbox.add_room(worker.schedule)
        self._births.count_success()
        worker.tasks_run += 1
        worker.rss_bytes = frame["rss_bytes"]
        if worker.first_rss_bytes is None:
            worker.first_rss_bytes = worker.rss_bytes
        if run.task.memory_bytes is not None:
            self._cgroups.apply_limit(worker, None)
        return event

    def _pass_on(self, worker: PooledWorker, run: Run, why_leave: str | None) -> bool:
        """Free the worker for what comes next; False when somebody has to end it."""
        with self._pools.lock:
            pool = self._pools.of(worker)
            pool.unassign(worker)
            self._pools.forget(run)
            if worker.stage in (Stage.KILLED, Stage.DEAD):
                return True
            # A signal of ours may still be on its way to it, so it is never used again.
            if not (why_leave or run.stop_reason):
                self._handover.employ(pool, worker)
                return True
            pool.enter(worker, Stage.LEAVING)
        log.info("worker %s leaves: %s", worker.name, why_leave or "it was told to stop")
        return False

    def _why_leave(self, worker: PooledWorker, event: ExecutorEvent) -> str | None:
        if self._births.is_over:
            return "the executor stops"
        if isinstance(event, Died):  # what a `MemoryError` left half done is not to be trusted
            return "its task ran out of memory"
        if worker.source_number != self._births.source_number:
            return "its zygote is gone"
        return reason_to_recycle(grown_bytes=worker.grown_bytes)
