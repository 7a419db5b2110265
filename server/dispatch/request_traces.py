# SPDX-License-Identifier: Apache-2.0
"""`RequestTraces`: the spans of requests, from what the dispatcher knows anyway.

    POST (FastAPI's own span) ──▶ submitting ──▶ requests.traceparent
    Claimer   ──begin──────▶ `process` begins; claimed ──▶ `queue`
    Submitter ──cancelled──▶ `queue` of what was never claimed
    Recorder  ──started, progressed──▶ kept ──ended──▶ `dispatch`, `run`, its phases; `process` ends
    recovery  ──lost───────▶ `process` of what a lost daemon left running

All but `process` are made whole when they have ended, so nothing is lost with a worker, and little
is kept: of each running request, who has it and its phases. How contexts cross processes:
`openenvd.tracing`.

What runs is the dispatcher's thread's alone. `submitting` and `cancelled` are the API's loop's, and
touch none of it, but that `cancelled` takes when its request was queued again, which is claimed by
nobody then; `lost` is called before either exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import __version__
from ...executor.policy.admission import Shortage
from ...processes.exits.exit_reason import ExitReason
from ...requests_db.records import Event, Json, NewRequest, Request, RequestError
from ...requests_db.states import RequestState
from ...system.access_tokens import without_token
from ...system.hidden_values import hide_credentials, hide_values, secret_values
from ...tracing import HEADER

MAX_PHASES = 64  # of one attempt; those after it are part of the last one
_SYSTEM = "openenvd"
_DAEMON_LOST = "daemon_lost"
_W3C = TraceContextTextMapPropagator()


class WaitReason(StrEnum):
    """What a request waited for in the queue."""

    NOTHING = "nothing"  # it was claimed when the dispatcher first saw it
    WORKER = "worker"  # all workers that may run it were busy
    MEMORY = "memory"  # it was expected to need more than was free


@dataclass(slots=True)
class _Attempt:
    """One attempt at a request that runs."""

    process: Span
    claimed_at: float
    started_at: float | None = None  # when a worker had it
    worker: str | None = None
    pid: int | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)  # names, and when they began


class RequestTraces:
    """Makes the spans of requests.

    Args:
        provider: What they are begun with.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer("openenvd", __version__)
        self._attempts: dict[str, _Attempt] = {}
        self._requeued_at: dict[str, float] = {}

    @contextmanager
    def submitting(self, new: NewRequest) -> Iterator[NewRequest]:
        """Yield the request with the trace that it is to be part of: the call's, or a new one."""
        is_call = get_current_span().get_span_context().is_valid
        # Else the daemon itself submits, to scale an environment.
        own = self._tracer.start_as_current_span(
            f"submit {new.operation}",
            kind=SpanKind.PRODUCER,
            attributes={"messaging.operation.type": "send"},
            record_exception=False,  # its message may have secrets
            set_status_on_exception=False,
        )
        with nullcontext() if is_call else own:
            yield replace(new, traceparent=_traceparent(get_current_span()))

    @staticmethod
    def accepted(request: Request) -> None:
        """Say on the call's span which request came of it."""
        get_current_span().set_attributes(_attributes(request))

    def cancelled(self, events: Iterable[Event]) -> None:
        """End the wait of requests that were cancelled before they were claimed."""
        for event in events:
            request = event.request
            if request is not None and request.state is RequestState.CANCELLED:
                next_one = replace(request, attempts=request.attempts + 1)
                self._end_queue(next_one, event.at, {"openenvd.state": request.state.value})

    def begin(self, request: Request) -> str | None:
        """Begin the span of a claimed request; returns the context that its worker is given."""
        if request.traceparent is None or request.started_at is None:
            return None
        span = self._begin_process(request, request.started_at)
        self._attempts[request.id] = _Attempt(span, request.started_at)
        return _traceparent(span)

    def released(self, request_id: str) -> None:
        """Forget a request that found no room: it waits on."""
        self._attempts.pop(request_id, None)

    def claimed(self, request: Request, reason: WaitReason, shortage: Shortage | None) -> None:
        """End the wait of a request, which has a worker now."""
        why: Json = {"openenvd.queue.wait_reason": reason.value}
        if shortage is not None:
            why["openenvd.queue.needs_bytes"] = shortage.needs_bytes
            why["openenvd.queue.free_bytes"] = shortage.free_bytes
        self._end_queue(request, request.started_at or request.created_at, why)

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
        attempt = self._attempts.pop(request.id, None)
        if state is RequestState.PENDING and request.traceparent is not None:
            self._requeued_at[request.id] = at
        if attempt is None:
            return
        how = {"openenvd.state": state.value, "openenvd.memory.peak_bytes": peak_bytes}
        how |= {} if exit_reason is None else _of_exit(exit_reason, request)
        process, began = _within(attempt.process), attempt.started_at
        self._whole("dispatch", process, request, attempt.claimed_at, began or at)
        if began is not None:
            who = {"openenvd.worker.name": attempt.worker, "process.pid": attempt.pid}
            run = self._begin(f"run {request.operation}", process, request, began, who)
            ends = [end for _, end in attempt.phases[1:]] + [at]
            for (name, since), until in zip(attempt.phases, ends, strict=False):
                self._whole(name, _within(run), request, since, until)
            _end(run, request, max(began, at), how, error)
        _end(attempt.process, request, max(attempt.claimed_at, at), how, error)

    def lost(self, request: Request, at: float, *, is_requeued: bool) -> None:
        """Make the span of an attempt that a lost daemon left running.

        Args:
            request: As it was left.
            at: When this daemon found it.
            is_requeued: Whether it is to be run again.
        """
        if request.traceparent is None or request.started_at is None:
            return
        if is_requeued:
            self._requeued_at[request.id] = at
        span = self._begin_process(request, request.started_at)
        how = {"openenvd.worker.name": request.worker, "process.pid": request.worker_pid}
        span.set_attributes(_given(how))
        _fail(span, _DAEMON_LOST, "the daemon was lost while this request ran")
        span.end(_nanoseconds(max(at, request.started_at)))

    def _end_queue(self, request: Request, until: float, more: Json) -> None:
        since = self._requeued_at.pop(request.id, request.created_at)
        if request.traceparent is not None:
            name = f"queue {request.operation}"
            self._whole(name, _context_of(request), request, since, until, more)

    def _begin_process(self, request: Request, at: float) -> Span:
        name, more = f"process {request.operation}", {"messaging.operation.type": "process"}
        kind = SpanKind.CONSUMER
        return self._begin(name, _context_of(request), request, at, more, kind)

    def _begin(
        self,
        name: str,
        context: Context,
        request: Request,
        at: float,
        more: Json,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        attributes = _given({**_attributes(request), **more})
        return self._tracer.start_span(
            name, context, kind, attributes=attributes, start_time=_nanoseconds(at)
        )

    def _whole(
        self,
        name: str,
        context: Context,
        request: Request,
        since: float,
        until: float,
        more: Json | None = None,
    ) -> None:
        span = self._begin(name, context, request, since, more or {})
        span.end(_nanoseconds(max(since, until)))


def _end(span: Span, request: Request, at: float, how: Json, error: RequestError | None) -> None:
    span.set_attributes(_given(how))
    if error is not None:
        _fail(span, error.kind.value, _shown(error.message.partition("\n")[0], request))
    span.end(_nanoseconds(at))


def _fail(span: Span, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))


def _traceparent(span: Span) -> str | None:
    """The span's context as text; None of one that the sampler does not want, or that has ended."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, _within(span))
    return carrier.get(HEADER)


def _context_of(request: Request) -> Context:
    return _W3C.extract({HEADER: str(request.traceparent)}, Context())


def _within(span: Span) -> Context:
    return set_span_in_context(span, Context())


def _given(attributes: Json) -> Json:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(request: Request) -> Json:
    name = request.environment
    found = {
        "messaging.system": _SYSTEM,
        "messaging.destination.name": request.schedule.value,
        "messaging.message.id": request.id,
        "openenvd.operation": request.operation,
        "openenvd.environment": None if name is None else _shown(without_token(name)[0], request),
        "openenvd.attempt": request.attempts or None,
    }
    return _given(found)


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
