# SPDX-License-Identifier: Apache-2.0
"""Spans as the SDK ends them, and what the log says of a collector that does not answer."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from openenvd.tracing.context import TraceContext
from openenvd.tracing.destination import Destination
from openenvd.tracing.tracer import STOP_SECONDS, Tracer, start

from .kept_spans import KeptSpans, attributes_of, ids_of

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
SPANS = 2000
COLLECTOR_SECONDS = 1


def test_a_span_has_the_context_times_and_attributes_that_it_is_given(kept: KeptSpans) -> None:
    context = PARENT.child("known")
    span = kept.tracer.begin(
        "process",
        parent=PARENT,
        context=context,
        kind="CONSUMER",
        at=1.5,
        attributes={"a": 1, "b": None},
    )
    assert span is not None
    assert span.context == context
    span.fail("oom_killed", "it was too much")
    span.end(2.5)
    [seen] = kept.all
    assert ids_of(seen) == (context.trace_id, context.span_id, PARENT.span_id)
    assert (seen.start_time, seen.end_time) == (1_500_000_000, 2_500_000_000)
    assert attributes_of(seen) == {"a": 1, "error.type": "oom_killed"}
    assert (seen.status.is_ok, seen.status.description) == (False, "it was too much")
    assert seen.kind.name == "CONSUMER"


def test_ids_are_random_but_where_they_are_given(kept: KeptSpans) -> None:
    given = PARENT.child("known")
    spans = [kept.tracer.begin("x", parent=PARENT, context=c) for c in (given, None, None)]
    assert len({span.context.span_id for span in spans if span is not None}) == 3


@pytest.mark.parametrize("parent", [None, TraceContext(PARENT.trace_id, PARENT.span_id, False)])
def test_what_is_not_sampled_is_no_span(parent: TraceContext | None) -> None:
    spans = KeptSpans(ALWAYS_OFF) if parent is None else KeptSpans()
    assert spans.tracer.begin("x", parent=parent) is None
    assert spans.all == []
    spans.tracer.stop()


def test_nothing_is_started_where_no_variable_asks_for_it() -> None:
    assert start({}) is None


def test_what_cannot_be_started_is_said_and_leaves_nothing() -> None:
    found = start({"OTEL_TRACES_EXPORTER": "console"})
    assert isinstance(found, Destination)
    assert found.problem == "OTEL_TRACES_EXPORTER=console: the only exporter is otlp"


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_BSP_SCHEDULE_DELAY", "0"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x")],
)
def test_a_variable_that_the_sdk_refuses_is_a_problem_of_the_destination(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    threads = set(threading.enumerate())
    environ = {"OTEL_TRACES_EXPORTER": "otlp", name: value}
    for each, text in environ.items():
        monkeypatch.setenv(each, text)
    found = start(environ)
    assert isinstance(found, Destination)
    assert found.problem is not None
    assert found.problem.startswith("OpenTelemetry cannot start: ")
    assert not set(threading.enumerate()) - threads


@pytest.mark.parametrize(("queue", "batch"), [("256", ""), ("8", "16")])
def test_a_queue_that_is_smaller_than_a_batch_makes_smaller_batches(
    monkeypatch: pytest.MonkeyPatch, queue: str, batch: str
) -> None:
    environ = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": queue}
    environ |= {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": batch} if batch else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    tracer = start(environ)
    assert isinstance(tracer, Tracer)
    tracer.stop()


def test_a_collector_that_is_away_is_logged_once_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and answers none
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": str(COLLECTOR_SECONDS),
            "OTEL_BSP_SCHEDULE_DELAY": "10",
            "OTEL_BSP_MAX_QUEUE_SIZE": "64",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.WARNING):
            tracer = start(environ)
            assert isinstance(tracer, Tracer)
            began = time.thread_time()
            waited = time.monotonic()
            for _ in range(SPANS):
                span = tracer.begin("x")
                assert span is not None
                span.end()
            # Had each of its batches waited for the collector, it would have been minutes.
            assert time.monotonic() - waited < SPANS / 8 * COLLECTOR_SECONDS / 10
            assert time.thread_time() - began < SPANS * 0.001
            while not any("cannot be sent" in text for text in caplog.messages):
                assert time.monotonic() - waited < 30, caplog.messages
                time.sleep(0.05)
            time.sleep(1.5 * COLLECTOR_SECONDS)  # for more tries
            waited = time.monotonic()
            tracer.stop()
            assert time.monotonic() - waited < STOP_SECONDS + 2
    assert sorted(text[:16] for text in caplog.messages) == ["more spans end t", "traces cannot be"]
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline
        time.sleep(0.05)
