# SPDX-License-Identifier: Apache-2.0
"""`benchmark`, as a worker calls it: against environments that were really launched."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
from pydantic import ValidationError

from openenvd.cli.commands.bench import _conclude
from openenvd.schema.errors import NotAnswering, OperationFailed
from openenvd.server.operations.benchmark import BenchmarkPayload

from .conftest import Run


def generators() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "openenvd.rollouts.bench.generator" in child.cmdline()]


def test_results_are_written_and_a_cancelled_one_leaves_no_generators(run: Run, home: Path) -> None:
    run("launch", source="benchmark")
    told: list[dict[str, Any]] = []
    asked = {"requests_grid": [4, 80], "wait_grid": [0.01], "repetitions": 2}
    result = run("benchmark", progress=told.append, name="benchmark", **asked)
    folder = Path(result["folder"])
    assert folder.is_relative_to(home)
    assert len((folder / "raw.jsonl").read_text().splitlines()) == 2 * (4 + 80)
    assert len((folder / "summary.csv").read_text().splitlines()) == 1 + 2 * 2
    assert {Path(path).name for path in result["files"]} == {each.name for each in folder.iterdir()}
    assert result["max_batch"] == [{"wait_seconds": 0.01, "sessions": 80}]
    assert told[-1]["done"] == told[-1]["total"] == 4
    assert generators() == []
    summary = json.loads((folder / "summary.json").read_text())["summaries"][-1]
    assert summary["successful"] == summary["unique_sessions"] == 80
    served = [part.split(":") for part in summary["shard_split"].split()]
    assert sum(int(count) for _, count in served) == 80
    assert summary["server_cpu_seconds"] > 0
    assert summary["generator_cpu_seconds"] > 0

    class Cancelled(Exception):
        pass

    def cancel(_number: int, _frame: Any) -> None:
        raise Cancelled

    def at_the_first_batch(told: dict[str, Any]) -> None:
        if told["total"]:
            assert generators() != []
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, cancel)
    asked = {"name": "benchmark", "requests_grid": [4], "wait_grid": [600]}
    try:
        with pytest.raises(Cancelled):
            run("benchmark", progress=at_the_first_batch, **asked)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert generators() == []


def test_one_that_cannot_wait_is_measured_and_failures_are_results(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("launch", source="echo")
    asked = {"requests_grid": [2], "repetitions": 1, "output_dir": str(tmp_path)}
    result = run("benchmark", name="echo", **asked)
    assert result["max_batch"] == [{"wait_seconds": 0.0, "sessions": 2}]
    assert result["tried"] == [2]
    for tried, sessions, words in (
        ([2], 2, "✓ echo holds at least 2 sessions (the most that was tried)"),
        ([2, 4], 2, "✓ echo holds 2 sessions"),
        ([2, 4], 0, "! echo holds fewer than 2 sessions (95 % of them have to succeed)"),
    ):
        largest = {"wait_seconds": 0.0, "sessions": sessions}
        changed = result | {"tried": tried, "max_batch": [largest]}
        assert click.unstyle(_conclude({"result": changed})[1][0]) == words
    said = capsys.readouterr().out
    assert 'each step plays {"message": ' in said
    assert "echo: 2 sessions #1: 100 %" in said  # nothing waits
    assert "wait" not in "".join(result["table"][2:])
    assert "processes" not in "".join(result["table"])  # no answer names one
    assert (tmp_path / "summary.csv").exists()
    action = {"no_such_field": 1}
    asked = {"requests_grid": [3], "repetitions": 1}
    with pytest.raises(OperationFailed, match="works: VALIDATION_ERROR: Invalid message") as caught:
        run("benchmark", name="echo", action=action, output_dir=str(tmp_path / "none"), **asked)
    assert "openenv logs echo" in str(caught.value.hint)
    report = json.loads((tmp_path / "none" / "summary.json").read_text())
    assert report["summaries"][0]["errors"] == "VALIDATION_ERROR:3"


def test_an_environment_that_does_not_run_cannot_be_measured(run: Run) -> None:
    with pytest.raises(NotAnswering, match="no replica"):
        run("benchmark", name="nobody")


@pytest.mark.parametrize(
    "fields",
    [
        {"requests_grid": []},
        {"requests_grid": [0]},
        {"requests_grid": [10**9]},
        {"wait_grid": []},
        {"wait_grid": [-1]},
        {"wait_grid": [float("nan")]},
        {"wait_grid": [float("inf")]},
        {"repetitions": 0},
        {"session_timeout_seconds": 0},
        {"window": 0},
        {"output_dir": "relative"},
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        BenchmarkPayload.model_validate({"name": "benchmark", **fields})
