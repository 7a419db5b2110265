# SPDX-License-Identifier: Apache-2.0
"""Trace contexts as text, and where a process finds its own."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from opentelemetry import trace

from openenvd.tracing.context import VARIABLE, TraceContext, current

from .kept_spans import KeptSpans

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TEXT = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_read_and_written() -> None:
    context = TraceContext.parse(TEXT)
    assert context == TraceContext(TRACE, SPAN, is_sampled=True)
    assert str(context) == TEXT
    assert str(TraceContext.parse(TEXT[:-1] + "2")) == TEXT[:-1] + "0"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "ff" + TEXT[2:],
        TEXT + "-more",
        TEXT.upper(),
        TEXT.replace(TRACE, "0" * 32),
        TEXT.replace(SPAN, "0" * 16),
        TEXT[:-1],
    ],
)
def test_what_w3c_forbids_is_no_traceparent(text: str | None) -> None:
    assert TraceContext.parse(text) is None


def test_later_versions_may_say_more() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN)


def test_a_childs_id_follows_from_its_parent_and_key() -> None:
    context = TraceContext(TRACE, SPAN)
    child = context.child("a")
    assert child == context.child("a") != context.child("b")
    assert (child.trace_id, len(child.span_id)) == (TRACE, 16)


def test_a_module_that_another_thread_is_importing_has_no_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    monkeypatch.setenv(VARIABLE, TEXT)
    assert str(current()) == TEXT


def test_the_callers_span_counts_before_the_variable(
    kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, TEXT)
    assert str(current()) == TEXT
    with kept.tracer.opentelemetry.start_as_current_span("training"):
        own = trace.get_current_span().get_span_context()
        assert current() == TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}")
    monkeypatch.delenv(VARIABLE)
    assert current() is None


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (("client.http", "cli.main", "rollouts.run", "operations.rollout"), "opentelemetry"),
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
