# SPDX-License-Identifier: Apache-2.0
"""The SDK as it is started, and what the log says of a collector that does not answer."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

from openenvd.tracing.destination import Destination, start
from openenvd.tracing.sending import STOP_SECONDS, Sending

SPANS = 2000
COLLECTOR_SECONDS = 1


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


def test_the_service_is_ours_unless_a_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variables, name in (({}, "openenvd"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")):
        for each, text in variables.items():
            monkeypatch.setenv(each, text)
        sending = start({"OTEL_TRACES_EXPORTER": "otlp"})
        assert isinstance(sending, Sending)
        assert sending.provider.resource.attributes["service.name"] == name
        assert "service.version" in sending.provider.resource.attributes
        sending.stop()


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
            sending = start(environ)
            assert isinstance(sending, Sending)
            tracer = sending.provider.get_tracer("test")
            began = time.thread_time()
            waited = time.monotonic()
            for _ in range(SPANS):
                tracer.start_span("x").end()
            # Had each of its batches waited for the collector, it would have been minutes.
            assert time.monotonic() - waited < SPANS / 8 * COLLECTOR_SECONDS / 10
            assert time.thread_time() - began < SPANS * 0.001
            while not any("cannot be sent" in text for text in caplog.messages):
                assert time.monotonic() - waited < 30, caplog.messages
                time.sleep(0.05)
            time.sleep(1.5 * COLLECTOR_SECONDS)  # for more tries
            waited = time.monotonic()
            sending.stop()
            assert time.monotonic() - waited < STOP_SECONDS + 2
    assert sorted(text[:16] for text in caplog.messages) == ["more spans end t", "traces cannot be"]
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline
        time.sleep(0.05)
