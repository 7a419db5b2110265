# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: where a request spends its time, and an episode of a rollout.

Spans are made through OpenTelemetry's API. Its SDK, of the extra `otel`, is imported in a process
whose environment has one of the standard variables that ask for traces (`sending.py`).

    client                     daemon                                        worker
    ──────                     ──────                                        ──────
    traceparent ──HTTP head──▶ POST /v1/requests        (span, kind server: FastAPI's own)
    (its own span,               │ requests.traceparent (a column: survives the daemon)
     or TRACEPARENT)             ├─ queue OPERATION      creation to claim, and why it waited
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
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

VARIABLE = "TRACEPARENT"  # OpenTelemetry's carrier between processes
HEADER = "traceparent"
_API = "opentelemetry.trace.propagation.tracecontext"


def traceparent() -> str | None:
    """Return the context of the code that calls: its OpenTelemetry span's, or TRACEPARENT.

    Where nothing has imported OpenTelemetry, no span of it is under way: the command line goes
    without it.
    """
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        import_module("opentelemetry.trace")  # another thread may be importing it still
        import_module(_API).TraceContextTextMapPropagator().inject(carrier)
    given = os.environ.get(VARIABLE, "")
    return carrier.get(HEADER) or (given if given.isascii() and given.isprintable() else "") or None
