# SPDX-License-Identifier: Apache-2.0
"""A measurement as text that a terminal has room for."""

from __future__ import annotations

from typing import Any

from openenvd.rollouts.bench.presentation import lines_of
from openenvd.rollouts.bench.results import Report, Summary
from openenvd.rollouts.bench.sweep import Plan

PLAN = Plan((16384,))


def summary(**fields: Any) -> Summary:
    """One batch, with wide figures."""
    figures = {
        "num_requests": 16384, "wait_seconds": 1.0, "repetition": 1, "server": "benchmark",
        "error_rate": 2e-4, "total_p50": 10.25, "total_p99": 2.75, "connect_p99": 10.1,
        "server_cpu_ms_per_session": 10.25, "kernel_listen_drops": 54321, "unique_pids": 4,
        "generator_busiest_share": 0.5,
    }  # fmt: skip
    return Summary(**{**figures, **fields})


def test_the_table_fits_eighty_columns() -> None:
    lines = lines_of(Report(PLAN, [summary(), summary(repetition=2, total_p99=9.75)]))
    assert max(map(len, lines[1:])) <= 80
    assert lines[1].startswith("all sessions connect at once")
    assert lines[2] == "benchmark, wait 1 s"
    assert "6.25 (2.75-9.75)" in lines[5]
    assert lines[5].endswith(" 4")


def test_values_that_differ_between_batches_have_a_column() -> None:
    lines = lines_of(Report(PLAN, [summary(server="other"), summary(wait_seconds=0.5)]))
    assert lines[2].split()[:3] == ["server", "wait", "sessions"]
    assert [line.split()[0] for line in lines[4:6]] == ["benchmark", "other"]


def test_a_window_is_named() -> None:
    plan = Plan((1,), window=1024, handshake_seconds=60.0)
    line = lines_of(Report(plan, [summary()]))[1]
    assert line == "at most 1024 handshakes at once; a handshake may take 60 s"


def test_nothing_measured_is_a_heading_alone() -> None:
    assert "sessions" in lines_of(Report(PLAN))[2]


def test_the_most_that_the_kernel_dropped_in_a_repetition_is_shown_and_explained() -> None:
    none, some = summary(kernel_listen_drops=0), summary(repetition=2, kernel_listen_drops=77)
    lines = lines_of(Report(PLAN, [none, some]))
    assert "77" in lines[5].split()
    assert "of the whole system" in lines[-2]
    assert not any("of the whole system" in line for line in lines_of(Report(PLAN, [none])))


def test_drops_that_the_system_does_not_tell_are_a_question_mark() -> None:
    assert "?" in lines_of(Report(PLAN, [summary(kernel_listen_drops=None)]))[5]
