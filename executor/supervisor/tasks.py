# SPDX-License-Identifier: Apache-2.0
"""Assigns tasks to workers, and turns workers' frames and exits into events.

    submit, on any thread ──▶ place ──┬─ a worker is idle ──▶ its pipe
                                      └─ none ──▶ waits
    a worker has started ──▶ employ ──┬─ a task waits ──────▶ its pipe
                              ▲       └─ none ──▶ IDLE, until `Timing.burst_idle` if not kept
    frame ──▶ on_frame ──┬─ progress ──▶ Progressed
                         └─ outcome ───▶ the task's event, then `employ`, or the worker must leave
    a worker has exited ──▶ end_with_worker ──▶ the event of the task that it ran
    nothing can be started, or the executor is stopping ──▶ refuse_waiting

A worker is not used again when it was asked to stop, when it reports that it must retire (it has
children or threads left), and for the reasons of `_why_leave`. If a frame comes from a worker that
has exited already, it ends the task, but does not free the worker.

Callers of `place`, `withdraw` and `employ` hold the pools' lock; the other methods take it. Any
thread may call `place` and `withdraw`; only the supervisor's may call the others.

Events wait in a deque, which needs no lock, until the end of a round, so that there is room for
another task when the end of one is delivered. `on_event` is called without the pools' lock, and
may call the executor.

`failure_event` and `exit_event` are pure, except that they read the tail of the log.
`system/process/diagnose.py` explains a worker's exit, from the evidence of `memory.py`.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from ...system.files.log_files import last_lines
from ...system.process.diagnose import Evidence, diagnose_exit
from ...system.process.exit_reason import ExitKind, ExitReason
from ...system.process.oom_evidence import read_oom_counters
from .. import messages
from ..policy.memory import Timing
from ..policy.plan import reason_to_recycle
from .channels import Channels, WakeUp
from .memory import WorkerMemory
from .pool import PooledWorker, Pools, Run, Stage, StopReason

log = logging.getLogger(__name__)


LOG_TAIL_LINES = 20  # of the log, in `Died`
Frame = dict[str, Any]


class EventBuffer:
    """Events in their order, until they are delivered."""

    def __init__(self, on_event: messages.EventSink) -> None:
        self._on_event = on_event
        self._events: deque[messages.ExecutorEvent] = deque()

    def add(self, event: messages.ExecutorEvent) -> None:
        """Have the event delivered at the end of the round. Any thread."""
        self._events.append(event)

    def deliver(self) -> None:
        """Deliver all events; a listener that fails misses one."""
        while self._events:
            event = self._events.popleft()
            try:
                self._on_event(event)
            except Exception:
                name, extra = type(event).__name__, {"request_id": event.task_id}
                log.exception("the executor's listener failed on %s", name, extra=extra)


@dataclass(eq=False, slots=True)
class Tasks:
    """The tasks that wait, run and end."""

    _pools: Pools
    _wake_up: WakeUp
    _channels: Channels
    _memory: WorkerMemory
    _events: EventBuffer
    _timing: Timing

    def place(self, run: Run) -> messages.Started | None:
        """Give the task to an idle worker at once, or have it wait for one.

        If it waits, the supervisor is woken up to request a worker.
        """
        pool = self._pools.by_schedule[run.task.schedule]
        worker = pool.idle_worker()
        if worker is None:
            pool.waiting.append(run)
            self._wake_up.wake()
            return None
        return self._assign(worker, run)

    def withdraw(self, run: Run) -> None:
        """Cancel a task that waits for a worker."""
        self._pools.remove_run(run)
        self._pools.by_schedule[run.task.schedule].waiting.remove(run)
        self._events.add(messages.Cancelled(run.task.id, time.time()))
        self._wake_up.wake()

    def _assign(self, worker: PooledWorker, run: Run) -> messages.Started:
        """Write the task into the worker's pipe."""
        now = time.monotonic()
        started = messages.Started(
            run.task.id, worker.name, worker.pid, worker.started_at, time.time()
        )
        if run.task.memory_bytes is not None:
            self._memory.apply_limit(worker, run.task.memory_bytes)
        if worker.cgroup is None and run.task.schedule == messages.LONG:
            # Too slow for SHORT tasks, and not needed with a cgroup, whose counters are exact.
            run.machine_oom_kills = read_oom_counters(None).vmstat
        self._memory.note_busy(worker, now)
        if not worker.pool.assign(worker, run, now):
            self._channels.write_when_ready(worker)
        self._wake_up.wake_by(worker.deadline)
        return started

    def employ(self, worker: PooledWorker) -> None:
        """Give a free worker the next waiting task, or let it idle. Under the lock."""
        if waiting := worker.pool.waiting:
            self._events.add(self._assign(worker, waiting.popleft()))
            return
        deadline = math.inf if worker.is_kept else time.monotonic() + self._timing.burst_idle
        worker.pool.enter(worker, Stage.IDLE, deadline=deadline)
        self._wake_up.wake_by(deadline)

    def on_frame(self, worker: PooledWorker, frame: Frame) -> bool:
        """Act on a frame of the worker; returns whether the worker has to exit.

        Raises `KeyError`, `TypeError`: a worker does not send such a frame.
        """
        run = worker.run
        if run is None or frame["task"] != run.task.id:
            return False  # a leftover thread of an operation reports on a task that is over
        if frame["kind"] == "progress":
            self._events.add(messages.Progressed(run.task.id, frame["data"], time.time()))
            return False
        event = self._outcome(worker, run, frame)
        self._events.add(event)
        self._pools.failed_starts = 0
        worker.tasks_run += 1
        if (rss_bytes := frame["rss_bytes"]) is not None:
            worker.first_rss_bytes = worker.first_rss_bytes or rss_bytes
            worker.grown_bytes = rss_bytes - worker.first_rss_bytes
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
            worker.pool.unassign(worker)
            worker.pool.remove(worker)
            if run is not None:
                self._pools.remove_run(run)
        if run is not None and evidence is not None:
            self._events.add(exit_event(worker, run, evidence))

    def refuse_waiting(self, kind: ExitKind, why: str) -> None:
        """Fail the waiting tasks, so that they do not hang."""
        with self._pools.lock:
            refused: list[Run] = []
            for pool in self._pools.by_schedule.values():
                refused += pool.waiting
                pool.waiting.clear()
            for run in refused:
                self._pools.remove_run(run)
        for run in refused:
            reason = ExitReason(kind, pid=0, evidence=why)
            self._events.add(messages.Died(run.task.id, "", reason, (), None, time.time()))

    def _outcome(self, worker: PooledWorker, run: Run, frame: Frame) -> messages.ExecutorEvent:
        if frame["kind"] == "succeeded":
            if worker.pool.schedule == messages.LONG:  # too slow for a SHORT task that succeeded
                self._memory.read_counters(worker)
            return messages.Succeeded(
                run.task.id, frame["result"], frame["peak_bytes"], time.time()
            )
        evidence = self._memory.evidence(worker, run, None, has_exited=False)
        return failure_event(worker, run, frame, evidence)

    def _free(self, worker: PooledWorker, run: Run, why_leave: str | None) -> bool:
        """Free the worker for the next task; True when it is LEAVING instead."""
        with self._pools.lock:
            worker.pool.unassign(worker)
            self._pools.remove_run(run)
            if worker.stage in (Stage.KILLED, Stage.EXITED):
                return False
            if not why_leave:
                self.employ(worker)
                return False
            worker.pool.enter(worker, Stage.LEAVING)
        log.info("stopping worker %s: %s", worker.name, why_leave, extra=worker.log_fields)
        return True

    def _why_leave(self, worker: PooledWorker, event: messages.ExecutorEvent) -> str | None:
        if self._pools.is_stopping:
            return "the executor is stopping"
        if isinstance(event, messages.Died):  # a `MemoryError` may have left its state half changed
            return "its task ran out of memory"
        if worker.source_number != self._pools.source_number:
            return "its zygote is gone"
        return reason_to_recycle(grown_bytes=worker.grown_bytes)


def failure_event(
    worker: PooledWorker, run: Run, frame: Frame, evidence: Evidence
) -> messages.ExecutorEvent:
    """Make the event of a task whose failure its worker reported."""
    task_id, peak = run.task.id, frame["peak_bytes"]
    if run.stop_reason is StopReason.CANCELLED:
        return messages.Cancelled(task_id, time.time())
    raised = frame["kind"] == "raised"
    memory_error = raised and frame["error"]["type"] == "MemoryError"
    if raised and not (memory_error or evidence.cgroup_killed or run.stop_reason):
        return messages.Raised(task_id, messages.TaskError(**frame["error"]), peak, time.time())
    # A worker that reports a cancellation without a request for one got a foreign SIGTERM.
    status = None if raised else int(signal.SIGTERM)
    known = replace(
        evidence,
        wait_status=status,
        memory_error=memory_error,
        peak_bytes=_largest(peak, evidence.peak_bytes),
    )
    return replace(_died(worker, run, known), peak_bytes=peak)


def exit_event(
    worker: PooledWorker, run: Run, evidence: Evidence
) -> messages.Died | messages.Cancelled:
    """Make the event of a task whose worker has exited."""
    if run.stop_reason is StopReason.CANCELLED:
        return messages.Cancelled(run.task.id, time.time())
    exited, violation = worker.exited, worker.limit_violation
    peak = _largest(None if exited is None else exited.peak_bytes, evidence.peak_bytes)
    known = replace(evidence, peak_bytes=peak, was_alone=exited is not None and exited.was_alone)
    if violation is not None:  # it covers the whole tree, and caused the kill
        known = replace(
            known,
            watchdog=violation.evidence,
            limit_bytes=violation.limit_bytes,
            peak_bytes=violation.held_bytes,
        )
    return _died(worker, run, known)


def _died(worker: PooledWorker, run: Run, evidence: Evidence) -> messages.Died:
    reason = diagnose_exit(
        replace(
            evidence,
            stopped_by_us=run.stop_reason is StopReason.SHUT_DOWN,
            timed_out=run.stop_reason is StopReason.TIMED_OUT,
            seconds=time.monotonic() - run.started,
        )
    )
    tail = tuple(last_lines(run.task.log_path, LOG_TAIL_LINES))
    return messages.Died(run.task.id, worker.name, reason, tail, reason.peak_bytes, time.time())


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
