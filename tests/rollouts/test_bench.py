# SPDX-License-Identifier: Apache-2.0
"""The plan of a measurement, the processes that count for a target, and the table of results."""

import os
import subprocess
import sys
from typing import Any

import pytest

from openenvd.rollouts.bench.results import (
    Report,
    Summary,
    Target,
    cpu_seconds,
    lines_of,
    processes_of,
)
from openenvd.rollouts.bench.sweep import Plan, crew_size

PLAN = Plan((16384,))


def test_every_cell_is_visited_once() -> None:
    plan = Plan((1, 2), (0.0, 1.0), repetitions=3)
    cells = list(plan.cells())
    assert len(cells) == len(set(cells)) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("largest", "cores", "files", "size"),
    [
        (1, 64, 20_000, 1),
        (512, 1, 20_000, 1),
        (512, 2, 20_000, 2),
        (16_384, 4, 20_000, 2),
        (16_384, 2, 1_024, 18),  # as many as it takes to have all sockets open
        (100_000, 4, 20_000, 6),
    ],
)
def test_generators_are_as_many_as_cores_and_files_ask_for(
    largest: int, cores: int, files: int, size: int
) -> None:
    assert crew_size(largest, cores, files) == size


def test_the_time_of_everything_below_a_process_count() -> None:
    code = "import os; sum(range(10**6)); os.fork(); sum(range(10**6)); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # both have said something
        target = Target("it", "http://127.0.0.1:1", (process.pid,))
        assert len(processes_of(target)) == 2
        used = cpu_seconds(target)
        assert used > 0
        assert process.stdin is not None
        process.stdin.write(b"\n\n")
        process.stdin.close()


def test_a_process_that_is_gone_has_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    target = Target("it", "http://127.0.0.1:1", (process.pid,))
    assert cpu_seconds(target) == 0.0
    assert os.getpid() not in {found.pid for found in processes_of(target)}


def summary(**fields: Any) -> Summary:
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


NONE, SOME = summary(kernel_listen_drops=0), summary(repetition=2, kernel_listen_drops=77)


@pytest.mark.parametrize(
    ("report", "line", "told"),
    [
        (
            Report(Plan((1,), window=1024, handshake_seconds=60.0), [summary()]),
            1,
            "at most 1024 handshakes at once; a handshake may take 60 s",
        ),
        (Report(PLAN), 2, "sessions"),
        (Report(PLAN, [summary(kernel_listen_drops=None)]), 5, "?"),
        (Report(PLAN, [NONE, SOME]), 5, " 77 "),
        (Report(PLAN, [NONE, SOME]), -2, "of the whole system"),
        (Report(PLAN, [summary(server="other"), summary(wait_seconds=0.5)]), 4, "benchmark  wait"),
    ],
    ids=[
        *("a window", "nothing was measured", "the system tells no drops"),
        *("the most drops of a repetition", "which are explained", "columns for what differs"),
    ],
)
def test_a_report_is_told_in_words(report: Report, line: int, told: str) -> None:
    assert told in lines_of(report)[line]
