# SPDX-License-Identifier: Apache-2.0
"""`RequestTraces`: the spans of requests, from what the dispatcher knows anyway.

    POST (api/traced_calls.py) ──CALL──▶ submitting ──▶ requests.traceparent
    Claimer   ──claimed────▶ `queue`
    Submitter ──cancelled──▶ `queue` of what was never claimed
    Recorder  ──started, progressed──▶ kept ──ended──▶ `process`, `dispatch`, `run`, its phases
    recovery  ──lost───────▶ `process` of what a lost daemon left running

A span is made whole when it has ended, so nothing is lost with a worker, and little is kept: of
each running request, who has it and its phases. How contexts cross processes: `openenvd.tracing`.

What runs is the dispatcher's thread's alone. `submitting` and `cancelled` are the API's loop's, and
touch none of it, but that `cancelled` takes when its request was queued again, which is claimed by
nobody then; `lost` is called before either exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ...executor.policy.admission import Shortage
from ...processes.exits.exit_reason import ExitReason
from ...requests_db.records import Event, Json, NewRequest, Request, RequestError
from ...requests_db.states import RequestState
from ...system.access_tokens import without_token
from ...system.hidden_values import hide_credentials, hide_values, secret_values
from ...tracing.context import TraceContext
from ...tracing.tracer import Span, Tracer

MAX_PHASES = 64  # of one attempt; those after it are part of the last one
_SYSTEM = "openenvd"
_DAEMON_LOST = "daemon_lost"


class WaitReason(StrEnum):
    """What a request waited for in the queue."""

    NOTHING = "nothing"  # it was claimed when the dispatcher first saw it
    WORKER = "worker"  # all workers that may run it were busy
    MEMORY = "memory"  # it was expected to need more than was free


@dataclass(frozen=True, slots=True)
class Call:
    """The API call that is being handled; its span is None where the sampler does not want it."""

    span: Span | None


CALL: ContextVar[Call] = ContextVar("CALL")


@dataclass(slots=True)
class _Attempt:
    """One attempt at a request that runs."""

    claimed_at: float
    started_at: float | None = None  # when a worker had it
    worker: str | None = None
    pid: int | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)  # names, and when they began


class RequestTraces:
    """Makes the spans of requests.

    Args:
        tracer: What they are begun with.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._attempts: dict[str, _Attempt] = {}
        self._requeued_at: dict[str, float] = {}

    @contextmanager
    def submitting(self, new: NewRequest) -> Iterator[NewRequest]:
        """Yield the request with the trace that it is to be part of: the call's, or a new one."""
        call = CALL.get(None)
        if call is None:  # the daemon itself submits, to scale an environment
            name, sent = f"submit {new.operation}", {"messaging.operation.type": "send"}
            call = own = Call(self.tracer.begin(name, kind="PRODUCER", attributes=sent))
        else:
            own = None
        try:
            traceparent = None if call.span is None else str(call.span.context)
            yield replace(new, traceparent=traceparent)
        finally:
            if own is not None and own.span is not None:
                own.span.end()

    @staticmethod
    def accepted(request: Request) -> None:
        """Say on the call's span which request came of it."""
        call = CALL.get(None)
        if call is not None and call.span is not None:
            call.span.set(_attributes(request))

    def cancelled(self, events: Iterable[Event]) -> None:
        """End the wait of requests that were cancelled before they were claimed."""
        for event in events:
            request = event.request
            if request is not None and request.state is RequestState.CANCELLED:
                next_one = replace(request, attempts=request.attempts + 1)
                state = {"openenvd.state": request.state.value}
                since = self._requeued_at.pop(request.id, request.created_at)
                self._end_queue(next_one, since, event.at, state)

    def context_of_run(self, request: Request) -> str | None:
        """The context that a claimed request's worker is given."""
        process = _process_context(request)
        return None if process is None else str(process.child("run"))

    def claimed(self, request: Request, reason: WaitReason, shortage: Shortage | None) -> None:
        """End the wait of a request, which has a worker now."""
        since = self._requeued_at.pop(request.id, request.created_at)
        if request.traceparent is None or request.started_at is None:
            return
        self._attempts[request.id] = _Attempt(request.started_at)
        why: Json = {"openenvd.queue.wait_reason": reason.value}
        if shortage is not None:
            why["openenvd.queue.needs_bytes"] = shortage.needs_bytes
            why["openenvd.queue.free_bytes"] = shortage.free_bytes
        self._end_queue(request, since, request.started_at, why)

    def started(self, request_id: str, worker: str, pid: int, at: float) -> None:
        """Note which worker has a request."""
        if (attempt := self._attempts.get(request_id)) is not None:
            attempt.started_at, attempt.worker, attempt.pid = at, worker, pid

    def progressed(self, request_id: str, data: Json, at: float) -> None:
        """Note the phase that a request reports."""
        attempt, phase = self._attempts.get(request_id), data.get("phase")
        if attempt is None or not isinstance(phase, str) or len(attempt.phases) >= MAX_PHASES:
            return
        if not attempt.phases or attempt.phases[-1][0] != phase:
            attempt.phases.append((phase, at))

    def ended(
        self,
        request: Request,
        at: float,
        *,
        state: RequestState,
        error: RequestError | None = None,
        exit_reason: ExitReason | None = None,
        peak_bytes: int | None = None,
    ) -> None:
        """Make the spans of an attempt that has ended.

        Args:
            request: As it was claimed.
            at: When it ended.
            state: What it is now; PENDING when it is to be run again.
            error: Why it failed.
            exit_reason: How its worker, or a replica that it was starting, exited.
            peak_bytes: The most memory that it used.
        """
        attempt, context = self._attempts.pop(request.id, None), _process_context(request)
        if state is RequestState.PENDING and request.traceparent is not None:
            self._requeued_at[request.id] = at
        if attempt is None or context is None:
            return
        how = {
            "openenvd.state": state.value,
            "openenvd.memory.peak_bytes": peak_bytes,
            **({} if exit_reason is None else _of_exit(exit_reason, request)),
        }
        self._end_process(request, context, attempt.claimed_at, at, how, error)
        has_it = attempt.started_at or at
        self._end_child("dispatch", request, context, attempt.claimed_at, has_it)
        if attempt.started_at is not None:
            self._end_run(request, context, attempt, at, how, error)

    def lost(self, request: Request, at: float, *, is_requeued: bool) -> None:
        """Make the span of an attempt that a lost daemon left running.

        Args:
            request: As it was left.
            at: When this daemon found it.
            is_requeued: Whether it is to be run again.
        """
        context = _process_context(request)
        if context is None or request.started_at is None:
            return
        if is_requeued:
            self._requeued_at[request.id] = at
        how = {"openenvd.worker.name": request.worker, "process.pid": request.worker_pid}
        span = self._begin_process(request, context, request.started_at)
        if span is not None:
            span.set(how)
            span.fail(_DAEMON_LOST, "the daemon was lost while this request ran")
            span.end(max(at, request.started_at))

    def _end_queue(self, request: Request, since: float, until: float, more: Json) -> None:
        root = TraceContext.parse(request.traceparent)
        if root is None:
            return
        span = self.tracer.begin(
            f"queue {request.operation}",
            parent=root,
            context=root.child(f"{_number(request)}/queue"),
            at=since,
            attributes={**_attributes(request), **more},
        )
        if span is not None:
            span.end(max(since, until))

    def _begin_process(self, request: Request, context: TraceContext, at: float) -> Span | None:
        return self.tracer.begin(
            f"process {request.operation}",
            parent=TraceContext.parse(request.traceparent),
            context=context,
            kind="CONSUMER",
            at=at,
            attributes={**_attributes(request), "messaging.operation.type": "process"},
        )

    def _end_process(
        self,
        request: Request,
        context: TraceContext,
        since: float,
        until: float,
        how: Json,
        error: RequestError | None,
    ) -> None:
        span = self._begin_process(request, context, since)
        if span is not None:
            _end(span, request, max(since, until), how, error)

    def _end_child(
        self, name: str, request: Request, parent: TraceContext, since: float, until: float
    ) -> None:
        span = self.tracer.begin(name, parent=parent, at=since, attributes=_attributes(request))
        if span is not None:
            span.end(max(since, until))

    def _end_run(
        self,
        request: Request,
        process: TraceContext,
        attempt: _Attempt,
        until: float,
        how: Json,
        error: RequestError | None,
    ) -> None:
        since, context = attempt.started_at or until, process.child("run")
        span = self.tracer.begin(
            f"run {request.operation}",
            parent=process,
            context=context,
            at=since,
            attributes={
                **_attributes(request),
                "openenvd.worker.name": attempt.worker,
                "process.pid": attempt.pid,
            },
        )
        ends = [at for _, at in attempt.phases[1:]] + [until]
        for (name, began), ended in zip(attempt.phases, ends, strict=False):
            self._end_child(name, request, context, began, ended)
        if span is not None:
            _end(span, request, max(since, until), how, error)


def _end(span: Span, request: Request, at: float, how: Json, error: RequestError | None) -> None:
    span.set(how)
    if error is not None:
        span.fail(error.kind.value, _shown(error.message.partition("\n")[0], request))
    span.end(at)


def _process_context(request: Request) -> TraceContext | None:
    root = TraceContext.parse(request.traceparent)
    return None if root is None else root.child(f"{_number(request)}/process")


def _number(request: Request) -> str:
    """What tells an attempt from all others at the same request."""
    return f"{request.id}/{request.attempts}.{request.lost_daemons}"


def _attributes(request: Request) -> Json:
    name = request.environment
    return {
        "messaging.system": _SYSTEM,
        "messaging.destination.name": request.schedule.value,
        "messaging.message.id": request.id,
        "openenvd.operation": request.operation,
        "openenvd.environment": None if name is None else _shown(without_token(name)[0], request),
        "openenvd.attempt": request.attempts or None,
    }


def _of_exit(reason: ExitReason, request: Request) -> Json:
    """The evidence of an exit; what it means is in `processes/exits/exit_reason.py`."""
    evidence = None if reason.evidence is None else _shown(reason.evidence, request)
    return {
        "process.exit.code": reason.exit_code,
        "openenvd.exit.kind": reason.kind.value,
        "openenvd.exit.signal": reason.signal_name,
        "openenvd.exit.detector": None if reason.detector is None else reason.detector.value,
        "openenvd.exit.certainty": reason.certainty.value,
        "openenvd.exit.limit_bytes": reason.limit_bytes,
        "openenvd.exit.peak_bytes": reason.peak_bytes,
        "openenvd.exit.evidence": evidence,
    }


def _shown(text: str, request: Request) -> str:
    """The text without the secrets that the request was given."""
    return str(hide_values(hide_credentials(text), secret_values(request.payload)))
