# SPDX-License-Identifier: Apache-2.0
"""`Tracer`: the one place where OpenTelemetry's SDK is imported, and only once `start` is called.

    begin ─▶ Span ─ end ─▶ SDK's bounded queue ─ its thread ─▶ _Exporter ─▶ OTLP/HTTP ─▶ collector
                                                                 └─▶ the log: lost, and found again

Thread-safe. Times are seconds since the epoch, as records have them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

from .. import __version__
from ..system.hidden_values import hide_credentials
from .context import TraceContext
from .destination import Destination, destination

log = logging.getLogger(__name__)

SERVICE_NAME = "openenvd"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say otherwise
STOP_SECONDS = 2.0  # for what is still to be sent when the process ends
_BATCH_SIZE = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
_DEFAULT_BATCH_SIZE = 512  # the SDK's
_HINT = "correct the OTEL_ variables that it is started with"
_ABORT_SECONDS = 0.5  # for a call to the collector to notice that it is to end

Attributes = Mapping[str, Any]  # None leaves one out


class Span:
    """A span that has begun and is sampled."""

    __slots__ = ("_api", "_span", "context")

    def __init__(self, span: Any, api: Any) -> None:
        self._span = span
        self._api = api
        found = span.get_span_context()
        self.context = TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}")

    def set(self, attributes: Attributes) -> None:
        """Set attributes; None leaves one out."""
        self._span.set_attributes(_given(attributes))

    def rename(self, name: str) -> None:
        """Give it a name that was not known when it began."""
        self._span.update_name(name)

    def fail(self, kind: str, message: str = "") -> None:
        """Mark it as failed.

        Args:
            kind: The value of `error.type`: one of few.
            message: What happened, in one line.
        """
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, message))

    def end(self, at: float | None = None) -> None:
        """End it, now or at a time that is over."""
        self._span.end(None if at is None else _nanoseconds(at))


class Stoppable(Protocol):
    """A `SpanExporter`, as far as it is used here."""

    def shutdown(self) -> None:
        """End what is under way."""


class Tracer:
    """Begins spans, and sends those that have ended.

    Args:
        provider: A `TracerProvider` of the SDK.
        ids: Its generator of ids.
        exporter: What its spans are sent by.
    """

    def __init__(self, provider: Any, ids: Ids, exporter: Stoppable) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context

        self._api = trace
        self._no_context = Context()  # the caller's own span is none of ours
        self._provider = provider
        self._ids = ids
        self._exporter = exporter
        self.opentelemetry = provider.get_tracer("openenvd", __version__)

    def begin(
        self,
        name: str,
        *,
        parent: TraceContext | None = None,
        context: TraceContext | None = None,
        kind: str = "INTERNAL",
        at: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span | None:
        """Begin a span; None when the sampler does not want it.

        Args:
            name: One of few: what differs from span to span is in attributes.
            parent: The span that it is part of; None begins a trace.
            context: Its own context, which others know already; None makes one.
            kind: The name of a `SpanKind`.
            at: When it began; None: now.
            attributes: The first attributes, which samplers see.
        """
        span = self._ids.using(
            None if context is None else int(context.span_id, 16),
            lambda: self.opentelemetry.start_span(
                name,
                context=self._api.set_span_in_context(self._remote(parent), self._no_context),
                kind=self._api.SpanKind[kind],
                attributes=_given(attributes or {}),
                start_time=None if at is None else _nanoseconds(at),
            ),
        )
        return Span(span, self._api) if span.get_span_context().trace_flags.sampled else None

    def stop(self) -> None:
        """Send what has ended, for `STOP_SECONDS` at most.

        A call to a collector that does not answer may still be under way when this returns: its
        thread ends with that call's time-out, and keeps no process from its end.
        """
        stopping = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        stopping.start()
        stopping.join(STOP_SECONDS)
        if stopping.is_alive():
            self._exporter.shutdown()
            stopping.join(_ABORT_SECONDS)

    def _remote(self, parent: TraceContext | None) -> Any:
        if parent is None:
            return self._api.INVALID_SPAN
        flags = self._api.TraceFlags.SAMPLED if parent.is_sampled else self._api.TraceFlags.DEFAULT
        return self._api.NonRecordingSpan(
            self._api.SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=True,
                trace_flags=self._api.TraceFlags(flags),
            )
        )


def start(environ: Mapping[str, str] | None = None) -> Tracer | Destination | None:
    """Start tracing as the standard variables say.

    Returns:
        The tracer, whose thread runs until `Tracer.stop`; where traces were to be sent, and the
        problem, where they cannot be; None where it is off.
    """
    given = os.environ if environ is None else environ
    to = destination(given)
    if to is None or to.problem is not None:
        return to
    try:
        return _started(to, given)
    except Exception as exc:  # of the SDK, which takes not every value of its variables
        why = hide_credentials(str(exc).partition("\n")[0])
        return replace(to, problem=f"OpenTelemetry cannot start: {why}", hint=_HINT)


def _started(to: Destination, environ: Mapping[str, str]) -> Tracer:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ids, exporter = Ids(), _Exporter(OTLPSpanExporter(), to)
    unless_started = ExitStack()
    unless_started.callback(exporter.shutdown)
    with unless_started:
        # What the variables say of the resource counts more than ours.
        resource = Resource({"service.name": SERVICE_NAME, "service.version": __version__}).merge(
            _without_unknown(Resource.create({"process.pid": os.getpid()}))
        )
        # Both have what is called of the SDK's classes, not to be imported for a definition.
        generator: Any = ids
        sender: Any = exporter
        provider = TracerProvider(resource=resource, id_generator=generator, shutdown_on_exit=False)
        batch = _batch_size(environ)
        provider.add_span_processor(BatchSpanProcessor(sender, max_export_batch_size=batch))
        unless_started.pop_all()
    return Tracer(provider, ids, exporter)


def _batch_size(environ: Mapping[str, str]) -> int | None:
    """As many spans as the queue takes at most, beyond which the SDK refuses; None: its default."""
    queue, batch = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", ""), environ.get(_BATCH_SIZE, "")
    if not queue.isdecimal():
        return None
    return min(int(queue), int(batch) if batch.isdecimal() else _DEFAULT_BATCH_SIZE)


class _Exporter:
    """Exports by another exporter, and logs when that fails, and when it works again.

    What OpenTelemetry logs by itself, with each try, is kept for that one line.
    """

    def __init__(self, exporter: Any, to: Destination) -> None:
        self._exporter = exporter
        self._endpoint = to.endpoint
        self._is_lost = False
        self._last_words = _LastWords()
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.handlers = [self._last_words]

    def export(self, spans: Sequence[Any]) -> Any:
        """Send the spans, and say whether that worked."""
        self._last_words.text = ""
        try:
            result = self._exporter.export(spans)
        except Exception as exc:  # of earlier versions, when the collector is silent
            self._note(is_lost=True, why=str(exc))
            raise
        self._note(is_lost=result.name != "SUCCESS", why=self._last_words.text)
        return result

    def _note(self, *, is_lost: bool, why: str) -> None:
        """Log the first loss, and the end of it."""
        if is_lost and not self._is_lost:
            text = "traces cannot be sent to %s, and are dropped until it takes them: %s"
            log.warning(text, self._endpoint, why or "it refused them")
        elif self._is_lost and not is_lost:
            log.warning("traces are sent to %s again", self._endpoint)
        self._is_lost = is_lost

    def shutdown(self) -> None:
        """End what is under way; called by the SDK, too, when everything was sent."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Called by the SDK; nothing is buffered here."""
        return bool(self._exporter.force_flush(timeout_millis))


class _LastWords(logging.Handler):
    """Keeps the last message; says once when spans are dropped, since more of them end than fit."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._has_told = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        if "queue" in self.text.lower() and "full" in self.text.lower() and not self._has_told:
            self._has_told = True
            text = "more spans end than can be sent, and some are dropped: see OTEL_TRACES_SAMPLER"
            log.warning("%s, OTEL_BSP_MAX_QUEUE_SIZE", text)


class Ids:
    """An `IdGenerator` of the SDK's: random ids, but for the one span whose id is given."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        self._random = RandomIdGenerator()
        self._given = threading.local()

    def using(self, span_id: int | None, begin: Callable[[], Any]) -> Any:
        """Return what `begin` does, with this id for the span that it begins."""
        self._given.span_id = span_id
        try:
            return begin()
        finally:
            self._given.span_id = None

    def generate_span_id(self) -> int:
        """Called by the SDK for each span."""
        span_id: int | None = getattr(self._given, "span_id", None)
        return span_id or self._random.generate_span_id()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._random, name)


def _without_unknown(resource: Any) -> Any:
    """Drop the name that the SDK makes up where no variable gives one."""
    from opentelemetry.sdk.resources import Resource

    found = dict(resource.attributes)
    if str(found.get("service.name", "")).startswith("unknown_service"):
        del found["service.name"]
    return Resource(found)


def _given(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
