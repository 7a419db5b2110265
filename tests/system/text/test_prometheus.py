# SPDX-License-Identifier: Apache-2.0
"""Metrics in Prometheus' text format."""

import pytest

from openenvd.system.text.prometheus import metric_family


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (True, "1"), (12_345_678, "12345678"), (0.25, "0.25"), (16_777_217.5, "16777217.5")],
)
def test_a_value_has_all_its_digits(value: float, text: str) -> None:
    page = metric_family("openenvd_steps_total", "Steps.", [({}, value)], "counter")
    assert page.splitlines()[-1] == f"openenvd_steps_total {text}"
