# SPDX-License-Identifier: Apache-2.0
"""How a task's end becomes an event, and the events that wait for the end of a round.

    other threads ──notify──▶ notices ──take_notices──┐
    supervisor thread ───────────────────────────add──┴▶ events ──┐
                      ──────────────────────────add_room─▶ freed ─┴─deliver──▶ on_event

No lock: the notices are a deque, whose ends may be used by two threads at once; all else is the
supervisor thread's. `on_event` is called without the pools' lock, and may call the executor.

`failure_event` and `exit_event` are pure, but for reading the tail of the log. What a worker's exit
means is decided in `system/process/diagnose.py`, from the evidence of `memory.py`.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from dataclasses import replace
from typing import Any

from ...system.files.log_files import last_lines
from ...system.process.diagnose import Evidence, diagnose_exit
from ...system.process.exit_reason import ExitKind, ExitReason
from ..messages import (
    Cancelled,
    Died,
    EventSink,
    ExecutorEvent,
    Raised,
    RoomFreed,
    TaskError,
)
from .pool import PooledWorker, Run, StopReason

log = logging.getLogger(__name__)

Frame = dict[str, Any]


class EventBuffer:
    """Events in their order; after them, in which pools there is room again."""

    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self._notices: deque[ExecutorEvent] = deque()
        self._events: list[ExecutorEvent] = []
        self._freed: set[str] = set()

    def notify(self, event: ExecutorEvent) -> None:
        """Add an event before any later event of a worker. Any thread."""
        self._notices.append(event)

    def take_notices(self) -> None:
        """Move what other threads added behind the events that are here."""
        while self._notices:
            self._events.append(self._notices.popleft())

    def add(self, event: ExecutorEvent) -> None:
        """Have the event delivered at the end of the round."""
        self._events.append(event)

    def add_room(self, schedule: str) -> None:
        """Note that a task of that schedule is over."""
        self._freed.add(schedule)

    def deliver(self) -> None:
        """Deliver all events; a listener that fails misses one."""
        events, self._events = self._events, []
        events.extend(RoomFreed(schedule) for schedule in self._freed)
        self._freed.clear()
        for event in events:
            try:
                self._on_event(event)
            except Exception:
                log.exception(
                    "the executor's listener failed on %s",
                    type(event).__name__,
                    extra={"request_id": getattr(event, "task_id", None)},
                )


def failure_event(
    worker: PooledWorker, run: Run, frame: Frame, evidence: Evidence, tail_lines: int
) -> ExecutorEvent:
    """Make the event of a task whose failure its worker reported."""
    task_id, peak = run.task.id, frame["peak_bytes"]
    if run.stop_reason is StopReason.CANCELLED:
        return Cancelled(task_id, time.time())
    raised = frame["kind"] == "raised"
    memory_error = raised and frame["error"]["type"] == "MemoryError"
    if raised and not (memory_error or evidence.cgroup_killed or run.stop_reason):
        return Raised(task_id, TaskError(**frame["error"]), peak, time.time())
    # A worker that reports a cancellation without a request for one got a foreign SIGTERM.
    status = None if raised else int(signal.SIGTERM)
    known = replace(
        evidence,
        wait_status=status,
        memory_error=memory_error,
        peak_bytes=_largest(peak, evidence.peak_bytes),
    )
    return replace(_died(worker, run, known, tail_lines), peak_bytes=peak)


def exit_event(
    worker: PooledWorker, run: Run, evidence: Evidence, tail_lines: int
) -> Died | Cancelled:
    """Make the event of a task whose worker has exited."""
    if run.stop_reason is StopReason.CANCELLED:
        return Cancelled(run.task.id, time.time())
    exited, violation = worker.exited, worker.limit_violation
    peak = _largest(None if exited is None else exited.peak_bytes, evidence.peak_bytes)
    known = replace(evidence, peak_bytes=peak, was_alone=exited is not None and exited.was_alone)
    if violation is not None:  # of the whole tree, and what it was killed for
        known = replace(
            known,
            watchdog=violation.evidence,
            limit_bytes=violation.limit_bytes,
            peak_bytes=violation.held_bytes,
        )
    return _died(worker, run, known, tail_lines)


def never_started(run: Run, why: str, *, stopped: bool) -> Died:
    """Make the event of a task that no worker ever took."""
    kind = ExitKind.STOPPED if stopped else ExitKind.LOST
    return Died(run.task.id, "", ExitReason(kind, pid=0, evidence=why), (), None, time.time())


def _died(worker: PooledWorker, run: Run, evidence: Evidence, tail_lines: int) -> Died:
    reason = diagnose_exit(
        replace(
            evidence,
            stopped_by_us=run.stop_reason is StopReason.SHUT_DOWN,
            timed_out=run.stop_reason is StopReason.TIMED_OUT,
            seconds=time.monotonic() - run.started,
        )
    )
    tail = tuple(last_lines(run.task.log_path, tail_lines))
    return Died(run.task.id, worker.name, reason, tail, reason.peak_bytes, time.time())


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
