# SPDX-License-Identifier: Apache-2.0
"""`RequestTraces`: the spans of requests, from what the dispatcher knows anyway.

    POST (FastAPI's own span) ──▶ traced ──▶ requests.traceparent
    Claimer   ──begin──────▶ `process` begins; claimed ──▶ `queue`
    Recorder  ──started──▶ `dispatch`, `run` begins; progressed ──▶ its phases; ended ──▶ all end

All spans are the daemon's, so nothing is lost with a worker; a daemon that is killed loses those of
the attempts that ran. How contexts cross processes: `server/tracing.py`.

Only the dispatcher's thread calls this, except for `traced`, which touches no state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import __version__
from ...requests_db.records import NewRequest, Request, RequestError
from ...schema.states import RequestState
from ...system.net.access import without_token
from ...system.net.traceparent import HEADER
from ...system.process.exit_reason import ExitReason
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials, hide_values, secret_values

_W3C = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Attempt:
    """One attempt at a request that runs."""

    request: Request
    process: trace.Span
    run: trace.Span | None = None  # once a worker has it
    phase: trace.Span | None = None
    phase_name: str = ""


class RequestTraces:
    """Makes the spans of requests; none without a `provider`."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self.provider = provider
        self._tracer = None if provider is None else provider.get_tracer("openenvd", __version__)
        self._attempts: dict[str, _Attempt] = {}
        self._requeued_at: dict[str, float] = {}

    def traced(self, new: NewRequest) -> NewRequest:
        """Return the request with the trace that it is part of: the call's, or a new one."""
        if self._tracer is None:
            return new
        span = trace.get_current_span()
        if span.get_span_context().is_valid:
            return replace(new, traceparent=_traceparent(span))
        # The daemon itself submits, to scale an environment.
        own = self._tracer.start_span(f"submit {new.operation}", kind=trace.SpanKind.PRODUCER)
        context = _traceparent(own)
        own.end()
        return replace(new, traceparent=context)

    def begin(self, request: Request) -> str | None:
        """Begin the span of a claimed request; returns the context that its worker is given."""
        if self._tracer is None or request.traceparent is None or request.started_at is None:
            return None
        name, context = f"process {request.operation}", _context_of(request)
        span = self._begin(name, context, request.started_at, request, kind=trace.SpanKind.CONSUMER)
        self._attempts[request.id] = _Attempt(request, span)
        return _traceparent(span)

    def released(self, request_id: str) -> None:
        """Drop the attempt at a request that found no room, and waits again."""
        self._attempts.pop(request_id, None)

    def claimed(self, request: Request) -> None:
        """End the wait of a request, which has a worker now."""
        since = self._requeued_at.pop(request.id, request.created_at)
        if self._tracer is not None and request.traceparent is not None:
            name, until = f"queue {request.operation}", request.started_at or since
            waited = self._begin(name, _context_of(request), since, request)
            waited.end(_nanoseconds(max(since, until)))

    def started(self, request_id: str, worker: str, pid: int | None, at: float) -> None:
        """End the hand-over of a request to its worker, which runs it now."""
        if (attempt := self._attempts.get(request_id)) is None:
            return
        request, process = attempt.request, trace.set_span_in_context(attempt.process)
        begun_at = request.started_at or at
        self._begin("dispatch", process, begun_at).end(_nanoseconds(max(begun_at, at)))
        attempt.run = self._begin(f"run {request.operation}", process, at)
        attempt.run.set_attributes(_given({"openenvd.worker.name": worker, "process.pid": pid}))

    def progressed(self, request_id: str, data: Json, at: float) -> None:
        """Begin the phase that a request reports, and end the one before it."""
        attempt, phase = self._attempts.get(request_id), data.get("phase")
        if attempt is None or attempt.run is None or phase == attempt.phase_name:
            return
        if isinstance(phase, str):
            if attempt.phase is not None:
                attempt.phase.end(_nanoseconds(at))
            attempt.phase_name = phase
            attempt.phase = self._begin(phase, trace.set_span_in_context(attempt.run), at)

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
        """End the spans of an attempt; `state` is PENDING if the request will run again."""
        if (attempt := self._attempts.pop(request.id, None)) is None:
            return
        if state is RequestState.PENDING:
            self._requeued_at[request.id] = at
        how: Json = {"openenvd.state": state.value, "openenvd.memory.peak_bytes": peak_bytes}
        if exit_reason is not None:
            how["openenvd.exit.kind"] = exit_reason.kind.value
            how["openenvd.exit.evidence"] = _shown(exit_reason.evidence, request)
        if attempt.phase is not None:
            attempt.phase.end(_nanoseconds(at))
        for span in filter(None, (attempt.run, attempt.process)):
            span.set_attributes(_given(how))
            if error is not None:
                span.set_attribute("error.type", error.kind.value)
                text = _shown(error.message.partition("\n")[0], request)
                span.set_status(trace.Status(trace.StatusCode.ERROR, text))
            span.end(_nanoseconds(at))

    def _begin(
        self,
        name: str,
        context: Context,
        at: float,
        request: Request | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> trace.Span:
        known: Json = {}
        if request is not None:
            environment = request.environment and without_token(request.environment)[0]
            known = _given(
                {
                    "openenvd.request.id": request.id,
                    "openenvd.environment": environment and _shown(environment, request),
                    "openenvd.attempt": request.attempts or None,
                }
            )
        assert self._tracer is not None
        return self._tracer.start_span(name, context, kind, known, start_time=_nanoseconds(at))


def _traceparent(span: trace.Span) -> str | None:
    """The span's context as text; None if the sampler drops the span."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(HEADER)


def _context_of(request: Request) -> Context:
    return _W3C.extract({HEADER: str(request.traceparent)})


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _given(attributes: Json) -> Json:
    return {name: value for name, value in attributes.items() if value is not None}


def _shown(text: str | None, request: Request) -> str | None:
    """The text without the secrets that the request was given."""
    shown: str | None = hide_values(hide_credentials(text), secret_values(request.payload))
    return shown
