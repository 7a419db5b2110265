# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: writes to the queue what the executor reported.

    executor's supervisor ──deliver()──▶ inbox ───────────────┐
    Claimer ──note_started()──▶ started, written a little later ┴─▶ record(): one transaction
                        events written ──▶ publish;  `Ended` ──▶ Claimer ◀───────┘

Owns the inbox (a deque that any thread appends to), the starts that are not yet written, the memory
estimates learned from peaks, and the counts of kills for memory. Only the dispatcher's thread calls
it, except for `deliver`; other threads may read `kills` and `retries`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from ...executor import messages
from ...requests_db.errors import DatabaseError
from ...requests_db.records import (
    MemoryEstimate,
    Outcome,
    PeakSample,
    Request,
    RequestError,
    Retry,
    label_of,
)
from ...requests_db.transactions import dispatching
from ...schema.states import ErrorKind, RequestState, Schedule
from ...system.process.exit_reason import ExitReason
from ...system.text.safe_text import without_secrets
from .memory_estimates import left_bytes
from .outcomes import FailureContext, FinalEvent, outcome_of, reason_of, retry_of, what_happened
from .running import DispatchContext, log_fields

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ended:
    """The consequences of one call of `record` for the next claim."""

    requests: list[str] = field(default_factory=list)
    requeued: set[Schedule] = field(default_factory=set)  # schedules with a request to run again


@dataclass(frozen=True, slots=True)
class _Ending:
    """A request that ended, and what is written of it: its outcome, or its retry."""

    event: FinalEvent
    request: Request | None  # None when this daemon did not claim it
    reason: ExitReason | None
    outcome: Outcome | None
    retry: Retry | None = None


class Recorder:
    """Writes outcomes, progress and learned memory estimates; a failed write is repeated whole."""

    def __init__(self, context: DispatchContext) -> None:
        self.estimates = context.estimates
        self.kills: Counter[tuple[str, str]] = Counter()  # for memory: by operation and detector
        self.retries: Counter[str] = Counter()  # by operation
        self._context = context
        self._inbox: deque[messages.ExecutorEvent] = deque()
        self._started: list[messages.ExecutorEvent] = []  # not yet written
        self._started_due = math.inf
        self._unwritten: dict[tuple[str, str], MemoryEstimate] = {}  # by operation and source
        self._estimates_due = -math.inf  # when those may be written
        self._ended = Ended()

    def deliver(self, event: messages.ExecutorEvent) -> None:
        """Take an event of the executor, to be written by the next `record` (any thread)."""
        self._inbox.append(event)

    def note_started(self, event: messages.Started) -> None:
        """Take an event that may be written `Timing.started_seconds` later."""
        self._started.append(event)
        due = time.monotonic() + self._context.timing.started_seconds
        self._started_due = min(self._started_due, due)

    def due_at(self) -> float:
        """Return when `record` has something to write, on the monotonic clock."""
        if self._inbox:
            return -math.inf
        return min(self._started_due, self._estimates_due if self._unwritten else math.inf)

    def record(self) -> Ended:
        """Write what was reported; after a `DatabaseError` the next call writes it."""
        reported = list(self._inbox)
        if reported or time.monotonic() >= self.due_at():
            self._write_all([*self._started, *reported])
            self._started, self._started_due = [], math.inf
        for _ in reported:
            self._inbox.popleft()  # only now: a failed write leaves them for the next turn
        ended, self._ended = self._ended, Ended()
        return ended

    def _write_all(self, batch: list[messages.ExecutorEvent]) -> None:
        """Write the batch; if one event cannot be written, the others are written all the same."""
        try:
            self._write(batch)
        except DatabaseError:
            raise
        except Exception as exc:
            if len(batch) > 1:
                log.exception("%d events cannot be written together; trying each", len(batch))
                for event in batch:
                    self._write_all([event])
                return
            [event] = batch
            extra = {"request_id": getattr(event, "task_id", None)}
            log.exception("%s cannot be written", type(event).__name__, extra=extra)
            if isinstance(event, FinalEvent):
                why = f"its outcome cannot be written: {exc}"
                error = messages.TaskError(type(exc).__name__, why)
                self._write([messages.Raised(event.task_id, error, None, event.at)])

    def _write(self, batch: list[messages.ExecutorEvent]) -> None:
        started = [e for e in batch if isinstance(e, messages.Started)]
        progressed = [e for e in batch if isinstance(e, messages.Progressed)]
        endings = [self._ending(e) for e in batch if isinstance(e, FinalEvent)]
        samples = [
            (ending.request, sample)
            for ending in endings
            if ending.request is not None and (sample := sample_of(ending.event)) is not None
        ]
        learned = self.estimates.learned(samples, time.time())
        unwritten = self._unwritten | {(each.operation, each.source): each for each in learned}
        # Quick requests would cause a write each: at most one per `learned_seconds`.
        is_due = any(e.reason for e in endings) or time.monotonic() >= self._estimates_due
        estimates = list(unwritten.values()) if is_due else []
        for ending in endings:
            self._end_log(ending)
        events = self._context.store.write(
            dispatching.record,
            started=[(e.task_id, e.worker, e.pid, e.pid_started_at, e.at) for e in started],
            progress=[(e.task_id, e.data, e.at) for e in progressed],
            outcomes=[e.outcome for e in endings if e.outcome is not None],
            retries=[e.retry for e in endings if e.retry is not None],
            learned=estimates,
        )
        # Only now: a failed write is tried again with the same batch.
        self._context.publish(events)
        self.estimates.accept(learned)
        self._unwritten = {} if is_due else unwritten
        if estimates:
            self._estimates_due = time.monotonic() + self._context.timing.learned_seconds
        for event in started:
            self._context.traces.started(event.task_id, event.worker, event.pid, event.at)
            self._log_start(event)
        for each in progressed:
            self._context.traces.progressed(each.task_id, each.data, each.at)
        for ending in endings:
            self._conclude(ending)

    def _ending(self, event: FinalEvent) -> _Ending:
        request, reason = self._context.running.get(event.task_id), reason_of(event)
        context = None
        if request and reason and isinstance(event, messages.Died | messages.Raised):
            peaks, long_running = self.estimates.peaks_of(request), len(self._context.running.long)
            context = FailureContext(request, peaks, long_running, self._context.budget_bytes)
            if (retry := retry_of(event, context)) is not None:
                return _Ending(event, request, reason, None, retry)
        return _Ending(event, request, reason, outcome_of(event, context))

    def _end_log(self, ending: _Ending) -> None:
        """Append to the request's log how its worker died."""
        if ending.retry is not None:
            text = ending.retry.message
        elif isinstance(ending.event, messages.Died):
            text = what_happened(ending.event)
        else:
            return
        path = self._context.paths.request_log(ending.event.task_id)
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log_file:
            log_file.write(f"openenvd: {text}\n")

    def _conclude(self, ending: _Ending) -> None:
        """Count what was written, and forget the request."""
        request = self._context.running.pop(ending.event.task_id, None)
        self._ended.requests.append(ending.event.task_id)
        if request is None:
            return
        outcome, retry = ending.outcome, ending.retry
        state, error = RequestState.PENDING, None
        if outcome is not None:
            state, error = outcome.state, outcome.error
        if retry is not None:
            self._ended.requeued.add(request.schedule)
            error = RequestError(ErrorKind.OOM_KILLED, retry.message)
        peak, at = getattr(ending.event, "peak_bytes", None), ending.event.at
        self._context.traces.ended(
            request, at, state=state, error=error, exit_reason=ending.reason, peak_bytes=peak
        )
        if ending.reason is not None and ending.reason.is_oom:
            self.kills[request.operation, str(ending.reason.detector or "unknown")] += 1
            self.retries[request.operation] += retry is not None
        _log_end(request, ending)

    def _log_start(self, event: messages.Started) -> None:
        request = self._context.running.get(event.task_id)
        if request is not None and log.isEnabledFor(level := _level_of(request)):
            extra = log_fields(request, worker=event.worker, pid=event.pid)
            text, which = "request %s (%s) runs on worker %s (pid %d)", label_of(request)
            log.log(level, text, request.id, which, event.worker, event.pid, extra=extra)


def _level_of(request: Request) -> int:
    """SHORT requests are too many for the daemon's log."""
    return logging.INFO if request.schedule is Schedule.LONG else logging.DEBUG


def _log_end(request: Request, ending: _Ending) -> None:
    error = ending.outcome.error if ending.outcome is not None else None
    level = _level_of(request) if ending.reason is None else logging.WARNING
    if not log.isEnabledFor(level):
        return
    if ending.retry is not None:
        how = f"is queued again: {ending.retry.message}"
    elif error is not None:
        first_line = without_secrets(error.message.partition("\n")[0], request.payload)
        how = f"failed ({error.kind}): {first_line}"
    else:
        assert ending.outcome is not None
        how = ending.outcome.state.lower()
    extra = log_fields(request)
    if isinstance(ending.event, messages.Died):
        extra |= {"worker": ending.event.worker, "pid": ending.event.exit.pid}
    log.log(level, "request %s (%s) %s", request.id, label_of(request), how, extra=extra)


def sample_of(event: FinalEvent) -> PeakSample | None:
    """Return the peak memory that is known of a request that ended; None when it is not known.

    A request that raised gives None, because it may have raised before it used its memory.
    """
    if isinstance(event, messages.Succeeded) and event.peak_bytes is not None:
        return PeakSample(event.at, event.peak_bytes + left_bytes(event.result))
    reason = reason_of(event)
    if reason is None or not reason.is_oom:
        return None
    known = [size for size in (reason.peak_bytes, reason.limit_bytes) if size is not None]
    return PeakSample(event.at, max(known), killed=True) if known else None
