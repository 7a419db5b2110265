# SPDX-License-Identifier: Apache-2.0
"""A measurement as text that a terminal has room for."""

from __future__ import annotations

from typing import Any

import pytest

from openenvd.bench.results import Report, Summary
from openenvd.bench.table import lines_of


def summary(**fields: Any) -> Summary:
    """One batch, with wide figures."""
    said = {
        "mode": "ws", "url": "", "num_requests": 16384, "batch_size": 16384, "wait_seconds": 1.0,
        "repetition": 1, "timestamp": "", "hardware": "", "server": "benchmark", "error_rate": 2e-4,
        "total_p50": 10.25, "total_p99": 2.75, "connect_p99": 10.1,
        "server_cpu_ms_per_session": 10.25, "kernel_listen_drops": 54321,
        "shard_split": "1:128 2:127 3:128 4:129",
    }  # fmt: skip
    return Summary(**{**said, **fields})


def test_the_table_fits_eighty_columns() -> None:
    lines = lines_of(Report([summary(), summary(repetition=2, total_p99=9.75)]))
    assert max(map(len, lines[1:])) <= 80
    assert lines[1] == "benchmark, ws, wait 1 s, all at once"
    assert "6.25 (2.75-9.75)" in lines[4]


def test_values_that_differ_between_batches_have_a_column() -> None:
    lines = lines_of(
        Report([summary(mode="http", window=1024), summary(wait_seconds=0.5, window=1024)])
    )
    assert lines[1] == "benchmark, window 1024"
    assert lines[2].split()[:3] == ["mode", "wait", "sessions"]
    assert [line.split()[0] for line in lines[4:6]] == ["http", "ws"]


@pytest.mark.parametrize(
    ("pids", "told"),
    [
        ("1:64", "64"),
        ("1:31 2:33", "33/31"),
        ("1:8 2:8 3:8", "3 x 8"),
        ("1:60 2:68 3:61", "3: 60-68"),
        ("", "54321"),
    ],
)
def test_the_split_of_sessions_is_abbreviated(pids: str, told: str) -> None:
    row = lines_of(Report([summary(shard_split=pids, kernel_listen_drops=54321)]))[4]
    assert row.endswith(told)


def test_nothing_measured_is_a_heading_alone() -> None:
    assert "sessions" in lines_of(Report())[1]


def test_the_most_that_the_kernel_dropped_in_a_repetition_is_shown_and_explained() -> None:
    none, some = summary(kernel_listen_drops=0), summary(repetition=2, kernel_listen_drops=77)
    lines = lines_of(Report([none, some]))
    assert "77" in lines[4].split()
    assert "of the whole system" in lines[-2]
    assert not any("of the whole system" in line for line in lines_of(Report([none])))


def test_drops_that_the_system_does_not_tell_are_a_question_mark() -> None:
    assert "?" in lines_of(Report([summary(kernel_listen_drops=None)]))[4]
