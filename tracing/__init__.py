# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: where a request spends its time, and an episode of a rollout.

Off, nothing of OpenTelemetry is imported and nothing is measured. It is on in a process whose
environment has one of the standard variables (`destination.py`), and then needs the extra `otel`.

Where a trace's context crosses processes:

    client                     daemon                                        worker
    ──────                     ──────                                        ──────
    traceparent ──HTTP head──▶ POST /v1/requests        (span, kind server)
    (its own span,               │ requests.traceparent (a column: survives the daemon)
     or TRACEPARENT)             ├─ queue OPERATION      creation to claim, and why it waited
                                 └─ process OPERATION    claim to end, and how it ended
                                     ├─ dispatch         claim until a worker has it
                                     └─ run OPERATION ──a frame──▶ TRACEPARENT, while it runs
                                         └─ phases                  rollout ──link──▶ episode
                                                                                       ├─ reset
                                                                                       ├─ policy
                                                                                       └─ step …

The daemon makes all spans of a request, when it claims the request and when the request has ended,
from what the executor reports anyway. So a worker's death loses none of them, and no worker imports
anything but a rollout's. Their ids follow from the request's id and attempt (`TraceContext.child`):
a daemon that finds a request which a lost daemon left running ends that attempt's span by its id.

An episode is a trace of its own, with a link to the rollout's `run` span: a rollout may have
millions of steps, and no viewer shows such a trace. So `OTEL_TRACES_SAMPLER` decides for each
episode. Other processes' spans can have the rollout's or request's as their parent by the standard
variable TRACEPARENT. `tracestate` is not carried along.

Failure cases:

* The collector does not answer. Spans wait in a bounded queue (`OTEL_BSP_MAX_QUEUE_SIZE`), from
  which a thread of its own sends them; what does not fit is dropped. Ending a span only appends to
  that queue, whoever ends it. The log says so once, and once more when the collector answers again.
* The process is killed. Spans that ended in its last seconds (`OTEL_BSP_SCHEDULE_DELAY`) are lost,
  and those that had not ended; the trace shows a gap there.
* The process ends. It waits `STOP_SECONDS` at most for what is still to be sent.
* The extra is missing, or the variables ask for what is not there. The daemon's log and
  `openenv up` say so, with the command; requests run as if tracing were off.

    context.py       W3C trace contexts as text: from a client, to a worker
    destination.py   the standard variables: whether, and where to
    tracer.py        the only module that imports OpenTelemetry's SDK

The spans of a request are made in `server/dispatch/request_traces.py`, those of an episode in
`rollouts/traced_episodes.py`. Every span and attribute is listed in `docs/tracing.md`.
"""
