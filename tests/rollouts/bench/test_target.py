# SPDX-License-Identifier: Apache-2.0
"""The processes of a target: what they use counts for it."""

from __future__ import annotations

import os
import subprocess
import sys

from openenvd.rollouts.bench.results import Target, cpu_seconds, processes_of


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
