# SPDX-License-Identifier: Apache-2.0
"""Assigns tasks to workers, and turns workers' frames into events.

    submit, on any thread ──▶ place ──┬─ a worker is idle ──▶ its pipe
                                      └─ none ──▶ waits
    a worker has started ──▶ employ ──┬─ a task waits ──────▶ its pipe
                              ▲       └─ none ──▶ IDLE, until `Timing.burst_idle` if not kept
    frame ──▶ on_frame ──┬─ progress ──▶ Progressed
                         └─ outcome ───▶ the task's event, then `employ`, or the worker must leave
    a worker has exited ──▶ end_with_worker ──▶ the event of the task that it ran
    nothing can be started, or the executor is stopping ──▶ refuse_waiting

A worker is not used again when it was asked to stop, when it reports that it must retire (it has
children or threads left), and for the reasons of `_why_leave`. What is read of a worker that has
exited ends its task, and nothing is left to be decided about the worker.

The pools' lock: `place`, `withdraw` and `employ` find it taken, the others take it. `place` and
`withdraw` are called on any thread; all else on the supervisor's.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from ..messages import LONG, Cancelled, Died, ExecutorEvent, Progressed, Started, Succeeded
from ..policy.memory import Timing
from ..policy.plan import reason_to_recycle
from .channels import Channels, WakeUp
from .events import EventBuffer, Frame, exit_event, failure_event, never_started
from .memory import WorkerMemory, machine_oom_kills
from .pool import Pool, PooledWorker, Pools, Run, Stage

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Tasks:
    """The tasks that wait, run and end."""

    _pools: Pools
    _wake_up: WakeUp
    _channels: Channels
    _memory: WorkerMemory
    _events: EventBuffer
    _timing: Timing
    _log_tail_lines: int

    # ------------------------------------------------------------------ any thread, under the lock

    def place(self, run: Run) -> Started | None:
        """Give the task to an idle worker, here and now; else have it wait for one.

        Only then is the supervisor woken up: to request a worker.
        """
        pool = self._pools.by_schedule[run.task.schedule]
        worker = pool.idle_worker()
        if worker is None:
            pool.waiting.append(run)
            self._wake_up.wake()
            return None
        return self._assign(pool, worker, run)

    def withdraw(self, run: Run) -> None:
        """Cancel a task that waits for a worker."""
        self._pools.remove_run(run)
        self._pools.by_schedule[run.task.schedule].waiting.remove(run)
        self._events.notify(Cancelled(run.task.id, time.time()))
        self._wake_up.wake()

    def _assign(self, pool: Pool, worker: PooledWorker, run: Run) -> Started:
        """Write the task into the worker's pipe."""
        now = time.monotonic()
        started = Started(run.task.id, worker.name, worker.pid, worker.started_at, time.time())
        if run.task.memory_bytes is not None:
            self._memory.apply_limit(worker, run.task.memory_bytes)
        if worker.cgroup is None and run.task.schedule == LONG:
            # Too dear for SHORT tasks; where there are cgroups they tell better.
            run.machine_oom_kills = machine_oom_kills()
        self._memory.note_busy(worker, now)
        if not pool.assign(worker, run, now):
            self._channels.write_when_ready(worker)
        self._wake_up.wake_by(worker.deadline)
        return started

    # ------------------------------------------------------------------ the supervisor's thread

    def employ(self, pool: Pool, worker: PooledWorker) -> None:
        """Give a free worker the next waiting task, or let it idle. Under the lock."""
        if pool.waiting:
            self._events.add(self._assign(pool, worker, pool.waiting.popleft()))
            return
        deadline = math.inf if worker.is_kept else time.monotonic() + self._timing.burst_idle
        pool.enter(worker, Stage.IDLE, deadline=deadline)
        self._wake_up.wake_by(deadline)

    def on_frame(self, worker: PooledWorker, frame: Frame) -> bool:
        """Act on a frame of the worker; returns whether the worker has to exit.

        Raises:
            KeyError, TypeError: a worker does not send such a frame.
        """
        run = worker.run
        if run is None or frame["task"] != run.task.id:
            return False  # a thread that an operation left reports on a task that is over
        if frame["kind"] == "progress":
            self._events.add(Progressed(run.task.id, frame["data"], time.time()))
            return False
        event = self._outcome(worker, run, frame)
        self._events.add(event)
        self._events.add_room(worker.schedule)
        self._pools.failed_starts = 0
        worker.tasks_run += 1
        worker.rss_bytes = frame["rss_bytes"]
        if worker.first_rss_bytes is None:
            worker.first_rss_bytes = worker.rss_bytes
        if run.task.memory_bytes is not None:
            self._memory.apply_limit(worker, None)
        # A signal of ours may still be on its way to a stopped worker: it is never used again.
        why_leave = frame["retire"] or self._why_leave(worker, event)
        return self._free(worker, run, why_leave or (run.stop_reason and "it was asked to stop"))

    def end_with_worker(self, worker: PooledWorker) -> None:
        """Take a worker that has exited out of its pool, and end the task that it ran."""
        run, evidence = worker.run, None
        if run is None:
            self._memory.read_counters(worker)
        else:
            status = None if worker.exited is None else worker.exited.status
            evidence = self._memory.evidence(worker, run, status, has_exited=True)
        with self._pools.lock:
            pool = self._pools.of(worker)
            pool.unassign(worker)
            pool.remove(worker)
            if run is not None:
                self._pools.remove_run(run)
        if run is not None and evidence is not None:
            self._events.add(exit_event(worker, run, evidence, self._log_tail_lines))
            self._events.add_room(worker.schedule)

    def refuse_waiting(self, why: str, *, stopped: bool) -> None:
        """Let the tasks that wait fail, rather than hang."""
        with self._pools.lock:
            refused: list[Run] = []
            for pool in self._pools.by_schedule.values():
                if pool.waiting:
                    self._events.add_room(pool.schedule)
                refused += pool.waiting
                pool.waiting.clear()
            for run in refused:
                self._pools.remove_run(run)
        for run in refused:
            self._events.add(never_started(run, why, stopped=stopped))

    def _outcome(self, worker: PooledWorker, run: Run, frame: Frame) -> ExecutorEvent:
        if frame["kind"] == "succeeded":
            if worker.schedule == LONG:  # too dear for a SHORT task that simply succeeded
                self._memory.read_counters(worker)
            return Succeeded(run.task.id, frame["result"], frame["peak_bytes"], time.time())
        evidence = self._memory.evidence(worker, run, None, has_exited=False)
        return failure_event(worker, run, frame, evidence, self._log_tail_lines)

    def _free(self, worker: PooledWorker, run: Run, why_leave: str | None) -> bool:
        """Free the worker for the next task; True when it is LEAVING instead."""
        with self._pools.lock:
            pool = self._pools.of(worker)
            pool.unassign(worker)
            self._pools.remove_run(run)
            if worker.stage in (Stage.KILLED, Stage.EXITED):
                return False
            if not why_leave:
                self.employ(pool, worker)
                return False
            pool.enter(worker, Stage.LEAVING)
        log.info("stopping worker %s: %s", worker.name, why_leave, extra=worker.log_fields)
        return True

    def _why_leave(self, worker: PooledWorker, event: ExecutorEvent) -> str | None:
        if self._pools.is_stopping:
            return "the executor is stopping"
        if isinstance(event, Died):  # what a `MemoryError` left half done is not to be trusted
            return "its task ran out of memory"
        if worker.source_number != self._pools.source_number:
            return "its zygote is gone"
        return reason_to_recycle(grown_bytes=worker.grown_bytes)
