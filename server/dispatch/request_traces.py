# SPDX-License-Identifier: Apache-2.0
"""`RequestTraces`: the spans of requests, from what the dispatcher knows anyway.

    POST (FastAPI's own span) ──▶ submitting ──▶ requests.traceparent
    Claimer   ──begin──────▶ `process` begins; claimed ──▶ `queue`
    Submitter ──cancelled──▶ `queue` of what was never claimed
    Recorder  ──started──▶ `dispatch`, `run` begins; progressed ──▶ its phases; ended ──▶ all end
    recovery  ──lost───────▶ all these, of what a lost daemon left running

All spans are the daemon's, so nothing is lost with a worker. How contexts cross processes:
`openenvd.tracing`.

What runs is the dispatcher's thread's alone. `submitting` and `cancelled` are the API's loop's, and
touch none of it, but that `cancelled` takes when its request was queued again, which is claimed by
nobody then; `lost` is called before either exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

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
from ...requests_db.states import ErrorKind, RequestState
from ...system.access_tokens import without_token
from ...system.hidden_values import hide_credentials, hide_values, secret_values
from ...tracing import HEADER

_DAEMON_LOST = RequestError(ErrorKind.WORKER_LOST, "the daemon was lost while this request ran")
_W3C = TraceContextTextMapPropagator()


class WaitReason(StrEnum):
    """What a request waited for in the queue."""

    NOTHING = "nothing"  # it was claimed when the dispatcher first saw it
    WORKER = "worker"  # all workers that may run it were busy
    MEMORY = "memory"  # it was expected to need more than was free


@dataclass(slots=True)
class _Attempt:
    """One attempt at a request that runs."""

    request: Request
    process: Span
    run: Span | None = None  # once a worker has it
    phase: Span | None = None
    phase_name: str = ""


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
            record_exception=False,  # its message may have secrets
            set_status_on_exception=False,
        )
        with nullcontext() if is_call else own:
            yield replace(new, traceparent=_traceparent(get_current_span()))

    @staticmethod
    def accepted(request: Request) -> None:
        """Say on the call's span which request came of it."""
        get_current_span().set_attributes(_given(_attributes(request)))

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
        name, at = f"process {request.operation}", request.started_at
        span = self._begin(name, _context_of(request), request, at, kind=SpanKind.CONSUMER)
        self._attempts[request.id] = _Attempt(request, span)
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

    def started(self, request_id: str, worker: str, pid: int | None, at: float) -> None:
        """End the hand-over of a request to its worker, which runs it now."""
        if (attempt := self._attempts.get(request_id)) is None:
            return
        request, process = attempt.request, set_span_in_context(attempt.process)
        self._begin("dispatch", process, request, request.started_at or at, until=at)
        who = {"openenvd.worker.name": worker, "process.pid": pid}
        attempt.run = self._begin(f"run {request.operation}", process, request, at, who)

    def progressed(self, request_id: str, data: Json, at: float) -> None:
        """Begin the phase that a request reports, and end the one before it."""
        attempt, phase = self._attempts.get(request_id), data.get("phase")
        if attempt is None or attempt.run is None or phase == attempt.phase_name:
            return
        if isinstance(phase, str):
            if attempt.phase is not None:
                attempt.phase.end(_nanoseconds(at))
            run, attempt.phase_name = set_span_in_context(attempt.run), phase
            attempt.phase = self._begin(phase, run, attempt.request, at)

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
        """End the spans of an attempt.

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
        evidence = {} if exit_reason is None else exit_reason.to_json()
        how = {f"openenvd.exit.{name}": _shown(each, request) for name, each in evidence.items()}
        how |= {"openenvd.state": state.value, "openenvd.memory.peak_bytes": peak_bytes}
        if attempt.phase is not None:
            attempt.phase.end(_nanoseconds(at))
        if attempt.run is not None:
            _end(attempt.run, request, at, how, error)
        _end(attempt.process, request, at, how, error)

    def lost(self, request: Request, at: float, *, is_requeued: bool) -> None:
        """Make the spans of an attempt that a lost daemon left running.

        Args:
            request: As it was left.
            at: When this daemon found it.
            is_requeued: Whether it is to be run again.
        """
        self.begin(request)
        if request.worker is not None and request.started_at is not None:
            self.started(request.id, request.worker, request.worker_pid, request.started_at)
        state = RequestState.PENDING if is_requeued else RequestState.FAILED
        self.ended(request, at, state=state, error=_DAEMON_LOST)

    def _end_queue(self, request: Request, until: float, more: Json) -> None:
        since = self._requeued_at.pop(request.id, request.created_at)
        if request.traceparent is not None:
            name = f"queue {request.operation}"
            self._begin(name, _context_of(request), request, since, more, until=until)

    def _begin(
        self,
        name: str,
        context: Context,
        request: Request,
        since: float,
        more: Json | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        until: float | None = None,
    ) -> Span:
        """Begin a span, and end it where it is known when."""
        attributes = _given(_attributes(request) | (more or {}))
        span = self._tracer.start_span(
            name, context, kind, attributes, start_time=_nanoseconds(since)
        )
        if until is not None:
            span.end(_nanoseconds(max(since, until)))
        return span


def _end(span: Span, request: Request, at: float, how: Json, error: RequestError | None) -> None:
    span.set_attributes(_given(how))
    if error is not None:
        span.set_attribute("error.type", error.kind.value)
        told = _shown(error.message.partition("\n")[0], request)
        span.set_status(Status(StatusCode.ERROR, told))
    span.end(_nanoseconds(at))


def _traceparent(span: Span) -> str | None:
    """The span's context as text; None of one that the sampler does not want, or that has ended."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(HEADER)


def _context_of(request: Request) -> Context:
    return _W3C.extract({HEADER: str(request.traceparent)})


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(request: Request) -> Json:
    name = request.environment
    return {
        "messaging.system": "openenvd",
        "messaging.destination.name": request.schedule.value,
        "messaging.message.id": request.id,
        "openenvd.operation": request.operation,
        "openenvd.environment": None if name is None else _shown(without_token(name)[0], request),
        "openenvd.attempt": request.attempts or None,
    }


def _given(attributes: Json) -> Json:
    return {name: value for name, value in attributes.items() if value is not None}


def _shown(value: Any, request: Request) -> Any:
    """The value without the secrets that the request was given."""
    return hide_values(hide_credentials(value), secret_values(request.payload))
