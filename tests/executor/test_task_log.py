# SPDX-License-Identifier: Apache-2.0
"""A task's log holds everything that was printed, however it ended; there is none of nothing."""

import pytest

from openenvd.executor.messages import LONG, SHORT, Died

from .executor_bench import Bench


def logs(bench: Bench) -> list[str]:
    return sorted(path.name for path in bench.home.glob("*.log"))


@pytest.mark.parametrize("schedule", [LONG, SHORT])
def test_a_task_that_prints_nothing_leaves_no_log(bench: Bench, schedule: str) -> None:
    for _ in range(3):
        bench.run("context", schedule=schedule)
    assert logs(bench) == []


def test_a_line_can_be_read_while_its_task_runs_and_survives_the_worker(bench: Bench) -> None:
    task_id = bench.submit("print_and_hang")
    bench.recorder.progress(task_id)
    assert bench.log(task_id) == "so far\n"
    bench.executor.cancel(task_id)
    bench.recorder.outcome(task_id)
    outcome = bench.run("print_by_child", {"then": "die"})
    assert isinstance(outcome, Died)
    assert outcome.log_tail == ("from a child",)
    assert bench.log(outcome.task_id) == "from a child\n"


def test_each_task_has_its_own_lines_and_no_others(bench: Bench) -> None:
    bench.run("context")
    printed = [bench.run("print_lines").task_id for _ in range(3)]
    bench.run("context")
    assert logs(bench) == [f"{task_id}.log" for task_id in printed]
    assert {bench.log(task_id).count("from a child") for task_id in printed} == {1}


def test_a_second_attempt_appends_to_the_log_of_the_first(bench: Bench) -> None:
    (bench.home / "task-0.log").write_text("the first attempt\n")
    task_id = bench.run("print_lines").task_id
    assert bench.log(task_id).splitlines() == [
        "the first attempt",
        "from python",
        "to stderr",
        "by descriptor",
        "from a child",
    ]
