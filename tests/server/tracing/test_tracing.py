# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: when it is started, which trace a process continues, and its page."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openenvd.server.tracing import STOP_SECONDS, start, stop
from openenvd.system.files.installation import install_command
from openenvd.system.net.traceparent import VARIABLE, traceparent

from .conftest import KeptSpans, ids_of

SPANS = 2000
COLLECTOR_SECONDS = 1
SetEnv = Callable[[dict[str, str]], None]
AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> SetEnv:
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
        (AT, "http://collector:4318"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "localhost:4318"),
        ({**AT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/b"}, "http://a/b"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:pw@a/"}, "http://***@a/"),
        (AT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://collector:4318"),
        (AT | {"OTEL_SERVICE_NAME": "mine"}, "http://collector:4318"),
    ],
)
def test_traces_are_on(setenv: SetEnv, environ: dict[str, str], expected: str) -> None:
    setenv(environ)
    provider, said = start()
    assert said == f"sent to {expected}"
    assert provider is not None
    name = environ.get("OTEL_SERVICE_NAME", "openenvd")
    assert provider.resource.attributes["service.name"] == name
    assert "service.version" in provider.resource.attributes
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


TEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_callers_span_counts_before_the_variable(
    kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, TEXT)
    assert traceparent() == TEXT
    with kept.tracer.start_as_current_span("training"):
        within = traceparent()
    trace_id, span_id, _ = ids_of(kept.one("training"))
    assert str(within).split("-")[1:3] == [trace_id, span_id]
    monkeypatch.delenv(VARIABLE)
    assert traceparent() is None


def test_a_variable_that_no_header_can_carry_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{TEXT}\r\nX-Other: 1")
    assert traceparent() is None


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (("client.http", "cli.main", "rollouts.run", "server.operations.rollout"), "opentelemetry"),
        (("env_host.__main__", "executor.worker"), "opentelemetry"),
        (("server.daemon",), "opentelemetry.sdk"),  # FastAPI imports the API by itself
    ],
)
def test_opentelemetry_is_imported_when_it_is_wanted_alone(
    rooms: tuple[str, ...], absent: str
) -> None:
    imports = "; ".join(f"import openenvd.{room}" for room in rooms)
    check = f"print([name for name in sys.modules if name.startswith({absent!r})])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}; {check}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "server/dispatch/request_traces.py",
    "rollouts/traced_episodes.py",
    "server/tracing.py",
)
NAMESPACES = "error|http|messaging|network|openenvd|process|server|service|url|user_agent"
SET = re.compile(rf'"((?:{NAMESPACES})(?:\.[a-z_]+)+)"')
QUERIED = re.compile(r"(?:span|resource)\.([a-z_]+(?:\.[a-z_]+)+) [!=]")
ROWS = re.compile(r"^\| (`[a-z_.`, ]+`) \|", re.MULTILINE)
LISTED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)`")
OF_CALLS = re.compile(r"^\| (`[a-z_.`, ]+`) \| call \|", re.MULTILINE)  # FastAPI sets them


def listed(page: str) -> set[str]:
    return {name for row in ROWS.findall(page) for name in LISTED.findall(row)}


def test_the_page_lists_the_attributes_of_the_code_and_its_queries_ask_for_no_others() -> None:
    code = "".join((ROOT / source).read_text() for source in SOURCES)
    page = (ROOT / "docs" / "tracing.md").read_text()
    assert {*SET.findall(code)} == listed(page) - {*LISTED.findall(OF_CALLS.findall(page)[0])}
    queried = set(QUERIED.findall(page))
    assert queried >= {"openenvd.exit.kind"}
    assert queried <= listed(page)


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
