# SPDX-License-Identifier: Apache-2.0
"""Where a process finds the trace that it is part of, and who imports OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys

import pytest

from openenvd.system.net.traceparent import VARIABLE, traceparent

from .kept_spans import KeptSpans, ids_of

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
