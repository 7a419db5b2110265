# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: where requests, and episodes of rollouts, spend their time.

Spans are made through OpenTelemetry's API. Its SDK, of the extra `otel`, is imported in a process
whose environment has one of the standard variables that ask for traces (`start`).

    client                     daemon                                        worker
    ──────                     ──────                                        ──────
    traceparent ──HTTP head──▶ POST /v1/requests        (span, kind server: FastAPI's own)
    (its own span,               │ requests.traceparent (a column: survives the daemon)
     or TRACEPARENT)             ├─ queue OPERATION      creation to claim
                                 └─ process OPERATION    claim to end ──a frame──▶ TRACEPARENT
                                     ├─ dispatch         claim until a worker has it   │
                                     └─ run OPERATION                                  │
                                         └─ phases                 rollout ──link──▶ episode
                                                                                       ├─ reset
                                                                                       ├─ policy
                                                                                       └─ step …

The daemon makes all spans of a request from what the executor reports anyway, so a worker's death
loses none (`server/dispatch/request_traces.py`). An episode is a trace of its own, since no viewer
shows one of a million steps (`rollouts/traced_episodes.py`). `tracestate` is not carried along.
A killed process loses the spans that had not been sent. `docs/tracing.md` lists every attribute.

    a span that ends ─▶ the SDK's bounded queue ─▶ its thread ─▶ OTLP/HTTP ─▶ collector

Nothing waits for the collector: what does not fit into the queue is dropped.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from .. import __version__
from ..system.files.installation import install_command
from ..system.text.safe_text import hide_credentials

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

STOP_SECONDS = 2.0  # for what is still to be sent when the process ends

log = logging.getLogger(__name__)


def start() -> tuple[TracerProvider | None, str | None]:
    """Start to send spans, if the standard variables ask for that.

    Returns:
        The maker of spans, or None; and for people, where spans are sent or why they are not, or
        None if that was not requested.
    """
    exporter = _variable("OTEL_TRACES_EXPORTER")
    endpoint = _variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    is_disabled = _variable("OTEL_SDK_DISABLED").lower() == "true"
    if is_disabled or exporter == "none" or not (exporter or endpoint):
        return None, None
    try:
        return _provider(exporter), f"sent to {hide_credentials(endpoint or 'localhost:4318')}"
    except ImportError:
        why = f"OpenTelemetry is not installed; {install_command('otel')}"
    except Exception as exc:  # the SDK does not accept every value of its variables
        why = hide_credentials(str(exc).partition("\n")[0])
    log.warning("no traces are sent: %s", why)
    return None, f"not sent: {why}"


def stop(provider: TracerProvider) -> None:
    """Send the spans that have ended; the SDK alone would wait 30 s for an absent collector."""
    stopping = threading.Thread(target=provider.shutdown, name="tracing", daemon=True)
    stopping.start()
    stopping.join(STOP_SECONDS)


def _variable(*names: str) -> str:
    """Return the first of these that is set."""
    return next(filter(None, (os.environ.get(name, "").strip() for name in names)), "")


def _provider(exporter: str) -> TracerProvider:
    protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if exporter not in {"", "otlp"} or protocol not in {"", "http/protobuf"}:
        given = " and ".join(filter(None, (exporter, protocol)))
        raise ValueError(
            f"OTEL_TRACES_EXPORTER=otlp with OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf (the"
            f" collector's port 4318) is all that can be used, not {given}"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # An error for each lost batch is enough; a warning for each attempt is too much.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    resource = Resource.create(
        {"service.name": "openenvd", "service.version": __version__, "process.pid": os.getpid()}
    ).merge(OTELResourceDetector().detect())  # variables count more
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
