# SPDX-License-Identifier: Apache-2.0
"""The spans of requests, from what the dispatcher reports."""

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from openenvd.requests_db.records import NewRequest, Request, RequestError
from openenvd.schema.states import ErrorKind, RequestState, Schedule
from openenvd.server.dispatch.request_traces import RequestTraces

from ..conftest import oom_killed
from ..tracing.conftest import KeptSpans, attributes_of, ids_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REQUEST = Request(
    "00f067aa0ba902b7",
    "launch",
    Schedule.LONG,
    {"source": "echo", "env": {"API_TOKEN": "hunter22"}},
    RequestState.RUNNING,
    created_at=100.0,
    environment="trial",
    attempts=1,
    started_at=103.0,
    traceparent=f"00-{TRACE}-{SPAN}-01",
)
NEW = NewRequest("scale", Schedule.LONG, {})
KILLED = oom_killed(7, 199, 200)


@pytest.fixture
def traces(kept: KeptSpans) -> RequestTraces:
    return RequestTraces(kept.provider)


def seconds(span: object) -> tuple[float, float]:
    return getattr(span, "start_time") / 1e9, getattr(span, "end_time") / 1e9  # noqa: B009


def claim(traces: RequestTraces, request: Request = REQUEST) -> None:
    traces.begin(request)
    traces.claimed(request)


def test_the_parts_of_a_request_follow_each_other(traces: RequestTraces, kept: KeptSpans) -> None:
    claim(traces)
    traces.started(REQUEST.id, "long-1", 4711, 104.0)
    for at, phase in ((104.5, "resolving"), (105.0, "starting"), (106.0, "starting")):
        traces.progressed(REQUEST.id, {"phase": phase}, at)
    traces.ended(REQUEST, 110.0, state=RequestState.SUCCEEDED, peak_bytes=42)
    times = {span.name: seconds(span) for span in kept.all}
    assert times == {
        "queue launch": (100.0, 103.0),
        "process launch": (103.0, 110.0),
        "dispatch": (103.0, 104.0),
        "run launch": (104.0, 110.0),
        "resolving": (104.5, 105.0),
        "starting": (105.0, 110.0),
    }
    process, run = kept.one("process launch"), kept.one("run launch")
    assert ids_of(kept.one("queue launch"))[2] == ids_of(process)[2] == SPAN
    assert ids_of(kept.one("dispatch"))[2] == ids_of(run)[2] == ids_of(process)[1]
    assert ids_of(kept.one("starting"))[2] == ids_of(run)[1]
    waited = attributes_of(kept.one("queue launch"))
    assert waited["openenvd.request.id"] == REQUEST.id
    told = attributes_of(run)
    assert (told["openenvd.worker.name"], told["process.pid"]) == ("long-1", 4711)
    assert (told["openenvd.state"], told["openenvd.memory.peak_bytes"]) == ("SUCCEEDED", 42)


def test_what_found_no_room_waits_on(traces: RequestTraces, kept: KeptSpans) -> None:
    traces.begin(REQUEST)
    traces.released(REQUEST.id)
    assert kept.all == []
    claim(traces, replace(REQUEST, started_at=104.0))
    assert seconds(kept.one("queue launch")) == (100.0, 104.0)


def test_a_death_is_told_with_its_evidence_and_without_secrets(
    traces: RequestTraces, kept: KeptSpans
) -> None:
    claim(traces)
    error = RequestError(ErrorKind.OOM_KILLED, "killed while hunter22 was used\nmore")
    reason = replace(KILLED, evidence="http://me:secret@host")
    traces.ended(REQUEST, 105.0, state=RequestState.FAILED, error=error, exit_reason=reason)
    process = kept.one("process launch")
    assert not kept.named("run launch")  # no worker had it
    assert not process.status.is_ok
    assert process.status.description == "killed while *** was used"
    told = attributes_of(process)
    assert told["error.type"] == told["openenvd.exit.kind"] == "oom_killed"
    assert "secret" not in told["openenvd.exit.evidence"]


def test_a_second_attempt_waits_from_the_end_of_the_first(
    traces: RequestTraces, kept: KeptSpans
) -> None:
    claim(traces)
    traces.ended(REQUEST, 105.0, state=RequestState.PENDING, exit_reason=KILLED)
    claim(traces, replace(REQUEST, attempts=2, started_at=107.0))
    first, second = kept.named("queue launch")
    assert seconds(second) == (105.0, 107.0)
    assert ids_of(first)[1] != ids_of(second)[1]


def test_requests_without_a_trace_make_no_spans(traces: RequestTraces, kept: KeptSpans) -> None:
    plain = replace(REQUEST, traceparent=None)
    claim(traces, plain)
    traces.started(plain.id, "long-1", 4711, 104.0)
    traces.progressed(plain.id, {"phase": "starting"}, 104.0)
    traces.ended(plain, 105.0, state=RequestState.SUCCEEDED)
    assert kept.all == []


def test_a_request_is_part_of_a_trace_or_its_own(traces: RequestTraces, kept: KeptSpans) -> None:
    with kept.tracer.start_as_current_span("POST"):
        new = traces.traced(NEW)
    trace_id, span_id, _ = ids_of(kept.one("POST"))
    assert str(new.traceparent).split("-")[1:3] == [trace_id, span_id]
    new = traces.traced(NEW)
    trace_id, span_id, parent = ids_of(kept.one("submit scale"))
    assert str(new.traceparent).split("-")[1:3] == [trace_id, span_id]
    assert parent is None


def test_a_call_that_the_sampler_does_not_want_makes_no_trace(kept: KeptSpans) -> None:
    unwanted = KeptSpans(ALWAYS_OFF)
    traces = RequestTraces(kept.provider)
    with unwanted.tracer.start_as_current_span("POST"):
        new = traces.traced(NEW)
    assert (new.traceparent, kept.all) == (None, [])
    unwanted.provider.shutdown()
