# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's standard variables switch traces on and off."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenvd.system.extras import install_command
from openenvd.tracing import destination as module
from openenvd.tracing.destination import destination

AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


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
def test_traces_are_off(environ: dict[str, str]) -> None:
    assert destination(environ) is None


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        (AT, "http://collector:4318/v1/traces"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/b"}, "http://a/b"),
        ({**AT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/b"}, "http://a/b"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:pw@a/"}, "http://***@a/v1/traces"),
        ({**AT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://collector:4318/v1/traces"),
    ],
)
def test_traces_are_sent_there(environ: dict[str, str], endpoint: str) -> None:
    found = destination(environ)
    assert found is not None
    assert (found.endpoint, found.problem) == (endpoint, None)


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER=otlp"),
        (
            {**AT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, at the collector's port 4318",
        ),
    ],
)
def test_what_cannot_be_done_is_said_with_what_can(environ: dict[str, str], hint: str) -> None:
    found = destination(environ)
    assert found is not None
    assert found.problem
    assert found.hint == hint


def test_a_broken_installation_is_said_as_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("from os import no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_MODULES", ("broken_package.inner",))
    found = destination(AT)
    assert found is not None
    assert (found.problem, found.hint) == (
        "OpenTelemetry is not installed",
        install_command("otel"),
    )


def test_a_missing_extra_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MODULES", ("a_module.that_is_not_there",))
    found = destination(AT)
    assert found is not None
    assert (found.problem, found.hint) == (
        "OpenTelemetry is not installed",
        install_command("otel"),
    )
