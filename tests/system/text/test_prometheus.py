# SPDX-License-Identifier: Apache-2.0
"""Metrics in Prometheus' text format, and the rules that pages of them are held to."""

from __future__ import annotations

import pytest

from openenvd.system.text.prometheus import metric_family

from ...prometheus_rules import lint


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (True, "1"), (12_345_678, "12345678"), (0.25, "0.25"), (16_777_217.5, "16777217.5")],
)
def test_a_value_has_all_its_digits(value: float, text: str) -> None:
    page = metric_family("openenvd_steps_total", "Steps.", [({}, value)], "counter")
    assert page.splitlines()[-1] == f"openenvd_steps_total {text}"
    assert lint(page) == []


@pytest.mark.parametrize(
    ("name", "kind", "labels", "wrong"),
    [
        ("steps", "counter", {}, "a counter ends in _total"),
        ("steps_total", "gauge", {}, "only a counter ends in _total"),
        ("lag_ms", "gauge", {}, "not a base unit"),
        ("lag_seconds", "gauge", {"quantile": "1"}, "`quantile` is for summaries"),
        ("loopLag_seconds", "gauge", {}, "camelCase"),
        ("steps_gauge", "gauge", {}, "its name has its type"),
    ],
)
def test_a_broken_rule_is_named(name: str, kind: str, labels: dict[str, str], wrong: str) -> None:
    assert lint(metric_family(name, "Text.", [(labels, 1)], kind)) == [f"{name}: {wrong}"]


def test_what_is_no_page_is_found() -> None:
    assert lint("# HELP a Text.\n# TYPE a gauge\na 1\na 1\n") == ["the same sample twice: a 1"]
    assert lint("a{b=c} 1\n") == ["no sample: a{b=c} 1"]
    assert lint("a 1\n") == ["a: not declared"]
    assert lint("# TYPE a gauge\na 1\n") == ["a: no help"]
