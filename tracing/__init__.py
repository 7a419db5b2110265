# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: where a request spends its time, and an episode of a rollout.

Spans are made through OpenTelemetry's API. Off, nothing is measured, and nothing of the SDK is
imported. It is on in a process whose environment has one of the standard variables
(`destination.py`), and then needs the extra `otel`.

Where a trace's context crosses processes:

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

The daemon makes all spans of a request from what the executor reports anyway. So a worker's death
loses none of them, and no worker imports anything but a rollout's.

An episode is a trace of its own, with a link to the rollout's `process` span: a rollout may have
millions of steps, and no viewer shows such a trace. So `OTEL_TRACES_SAMPLER` decides for each
episode. Other processes' spans can have the rollout's or request's as their parent by the standard
variable TRACEPARENT. `tracestate` is not carried along.

Failure cases:

* The collector does not answer. Spans wait in a bounded queue (`OTEL_BSP_MAX_QUEUE_SIZE`), from
  which a thread of its own sends them; what does not fit is dropped. Ending a span only appends to
  that queue, whoever ends it. The log says so once, and once more when the collector answers again.
* The process is killed. Spans that ended in its last seconds (`OTEL_BSP_SCHEDULE_DELAY`) are lost,
  and those that had not ended. A daemon that finds a request which a lost daemon left running makes
  a `process` span of that attempt.
* The process ends. It waits `STOP_SECONDS` at most for what is still to be sent.
* The extra is missing, or the variables ask for what is not there. The daemon's log and
  `openenv up` say so, with the command; requests run as if tracing were off.

    destination.py   the standard variables: whether, and where to
    sending.py       the only module that imports OpenTelemetry's SDK

The spans of a request are made in `server/dispatch/request_traces.py`, those of an episode in
`rollouts/traced_episodes.py`. Every span and attribute is listed in `docs/tracing.md`.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "TRACEPARENT"  # OpenTelemetry's carrier between processes
HEADER = "traceparent"
_API = "opentelemetry.trace.propagation.tracecontext"


def traceparent() -> str | None:
    """Return the context of the code that calls: its OpenTelemetry span's, or TRACEPARENT.

    Where nothing has imported OpenTelemetry, no span of it is under way: the command line goes
    without it.
    """
    propagator = getattr(sys.modules.get(_API), "TraceContextTextMapPropagator", None)
    carrier: dict[str, str] = {}
    if propagator is not None:
        propagator().inject(carrier)
    given = os.environ.get(VARIABLE, "")
    return carrier.get(HEADER) or (given if given.isascii() and given.isprintable() else "") or None
