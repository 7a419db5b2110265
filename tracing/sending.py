# SPDX-License-Identifier: Apache-2.0
"""`Sending`: OpenTelemetry's SDK, started as its standard variables say.

a span that ends ─▶ the SDK's bounded queue ─ its thread ─▶ _Exporter ─▶ OTLP/HTTP ─▶ collector
└─▶ the log: lost, found again
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

from .. import __version__
from ..system.hidden_values import hide_credentials

log = logging.getLogger(__name__)

SERVICE_NAME = "openenvd"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say otherwise
STOP_SECONDS = 2.0  # for what is still to be sent when the process ends
_ABORT_SECONDS = 0.5  # for a call to the collector to notice that it is to end


@dataclass(frozen=True, slots=True)
class Sending:
    """What sends the spans that have ended."""

    provider: TracerProvider
    exporter: SpanExporter

    @classmethod
    def start(cls, endpoint: str) -> Sending:
        """Start it.

        Args:
            endpoint: Where traces are sent, for the log; the SDK reads its variables itself.

        Raises:
            Exception: Of the SDK, which takes not every value of its variables.
        """
        ours = {"service.name": SERVICE_NAME, "service.version": __version__}
        resource = Resource.create().merge(Resource({**ours, "process.pid": os.getpid()}))
        resource = resource.merge(OTELResourceDetector().detect())  # variables count more
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _Exporter(endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, exporter)

    def stop(self) -> None:
        """Send what has ended, for `STOP_SECONDS` at most.

        A call to a collector that does not answer may still be under way when this returns: its
        thread ends with that call's time-out, and keeps no process from its end.
        """
        stopping = threading.Thread(target=self.provider.shutdown, name="tracing", daemon=True)
        stopping.start()
        stopping.join(STOP_SECONDS)
        if stopping.is_alive():
            self.exporter.shutdown()
            stopping.join(_ABORT_SECONDS)


class _Exporter(OTLPSpanExporter):
    """Logs when spans cannot be sent, and when they can again.

    What OpenTelemetry logs by itself, with each try, is kept for that one line.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._sent_to = endpoint
        self._is_lost = False
        self._last_words = _LastWords()
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.handlers = [self._last_words]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._last_words.text = ""
        result = super().export(spans)
        is_lost = result is not SpanExportResult.SUCCESS
        if is_lost and not self._is_lost:
            text = "traces cannot be sent to %s, and are dropped until it takes them: %s"
            why = hide_credentials(self._last_words.text) or "it refused them"
            log.warning(text, self._sent_to, why)
        elif self._is_lost and not is_lost:
            log.warning("traces are sent to %s again", self._sent_to)
        self._is_lost = is_lost
        return result


class _LastWords(logging.Handler):
    """Keeps the last message; says once when spans are dropped, since more of them end than fit."""

    text = ""
    _has_told = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        if self.text.startswith("Queue full") and not self._has_told:
            self._has_told = True
            text = "more spans end than can be sent, and some are dropped: see OTEL_TRACES_SAMPLER"
            log.warning("%s, OTEL_BSP_MAX_QUEUE_SIZE", text)
