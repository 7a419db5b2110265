# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's SDK: when it is started, and that a collector which is away holds nothing up."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest

from openenvd.server.tracing import STOP_SECONDS, start, stop
from openenvd.system.files.installation import install_command

SPANS = 2000
COLLECTOR_SECONDS = 1
SetEnv = Callable[[dict[str, str]], None]
AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> SetEnv:
    """Sets variables until the test ends."""

    def set_all(environ: dict[str, str]) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        {**AT, "OTEL_SDK_DISABLED": "True"},
        {**AT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
    ],
)
def test_traces_are_off(setenv: SetEnv, environ: dict[str, str]) -> None:
    setenv(environ)
    assert start() == (None, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (AT, "sent to http://collector:4318"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "sent to localhost:4318"),
        ({**AT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/b"}, "sent to http://a/b"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:pw@a/"}, "sent to http://***@a/"),
        (AT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "sent to http://collector:4318"),
    ],
)
def test_traces_are_on(setenv: SetEnv, environ: dict[str, str], expected: str) -> None:
    setenv(environ)
    provider, said = start()
    assert said == expected
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "openenvd"
    assert "service.version" in provider.resource.attributes
    provider.shutdown()


def test_a_variable_names_the_service(setenv: SetEnv) -> None:
    setenv({**AT, "OTEL_SERVICE_NAME": "mine"})
    provider, _ = start()
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "not console"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "0"}, "schedule_delay_millis must be positive"),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "x"}, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_and_leaves_nothing(
    setenv: SetEnv, caplog: pytest.LogCaptureFixture, environ: dict[str, str], word: str
) -> None:
    threads = set(threading.enumerate())
    setenv(AT | environ)
    provider, told = start()
    assert provider is None
    assert str(told).startswith("not sent: ")
    assert word in str(told)
    assert any(word in text for text in caplog.messages)
    assert not set(threading.enumerate()) - threads


def test_a_missing_extra_is_told_with_the_command(
    setenv: SetEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    setenv(AT)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    command = install_command("otel")
    assert start() == (None, f"not sent: OpenTelemetry is not installed; {command}")


def test_a_collector_that_is_away_holds_nothing_up(
    setenv: SetEnv, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and answers none
        setenv(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "OTEL_EXPORTER_OTLP_TIMEOUT": str(COLLECTOR_SECONDS),
                "OTEL_BSP_SCHEDULE_DELAY": "10",
                "OTEL_BSP_MAX_QUEUE_SIZE": "64",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "32",
            }
        )
        provider, _ = start()
        assert provider is not None
        tracer = provider.get_tracer("test")
        began = time.thread_time()
        waited = time.monotonic()
        for _ in range(SPANS):
            tracer.start_span("x").end()
        # Had each of its batches waited for the collector, it would have been a minute.
        assert time.monotonic() - waited < SPANS / 32 * COLLECTOR_SECONDS / 10
        assert time.thread_time() - began < SPANS * 0.001
        while not any("Failed to export" in text for text in caplog.messages):
            assert time.monotonic() - waited < 30, caplog.messages
            time.sleep(0.05)
        waited = time.monotonic()
        stop(provider)
        assert time.monotonic() - waited < STOP_SECONDS + 2
        deadline = time.monotonic() + 20
        while set(threading.enumerate()) - threads:
            assert time.monotonic() < deadline
            time.sleep(0.05)
