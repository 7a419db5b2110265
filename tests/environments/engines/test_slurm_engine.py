# SPDX-License-Identifier: Apache-2.0
"""Slurm's engine by the commands that it runs; a list of jobs stands for Slurm."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines.base import Instance, InstanceState, Labels, ReplicaPlan
from openenvd.environments.engines.slurm import commands as slurm_commands
from openenvd.environments.engines.slurm import engine as slurm
from openenvd.environments.engines.slurm import job_table
from openenvd.environments.engines.slurm.commands import Row
from openenvd.environments.engines.slurm.engine import SlurmEngine
from openenvd.environments.engines.slurm.job import (
    JobReport,
    leave_job,
    left_jobs,
    write_job,
)
from openenvd.system.process.process_identity import boot_seconds

LABELS = Labels("home", "echo", "echo-0-abc", "abc")
NODE = "n1 idle (null) 127.0.0.1\n"


class Jobs:
    """What Slurm knows, and which commands it was given that change anything."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.rows: dict[str, Row] = {}
        self.commands: list[tuple[str, ...]] = []

    def put(self, job: str, state: str, left: float | None = None) -> None:
        self.rows[job] = Row(job, state, "None", "n1", left, 120.0, LABELS, self.run_dir)

    def run(self, *command: str, stdin: str | None = None, seconds: float = 0.0) -> str:
        if command[0] == "sinfo":
            return NODE
        if "show" in command:
            return ""
        self.commands.append(command)
        if command[0] == "scancel":
            self.put(command[-1], "CANCELLED")
        if command[0] != "sbatch":
            return ""
        job = str(len(self.rows) + 7)
        self.put(job, "PENDING")
        return job

    def submitted(self) -> int:
        return sum(command[0] == "sbatch" for command in self.commands)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs(tmp_path)
    monkeypatch.setattr(slurm_commands, "run", made.run)
    monkeypatch.setattr(slurm_commands, "jobs", lambda: list(made.rows.values()))
    return made


def found_by(engine: SlurmEngine, plan: ReplicaPlan) -> Instance:
    found = engine.find(plan)
    assert found is not None
    return found


def report(folder: Path, **fields: Any) -> None:
    """Write down what job 7 says of itself."""
    JobReport(job="7", node="n1", host="n1", port=1, **fields).write(folder)


@pytest.fixture
def plan(tmp_path: Path) -> ReplicaPlan:
    return ReplicaPlan(labels=LABELS, image="", host="127.0.0.1", port=1, run_dir=str(tmp_path))


def test_a_replica_that_has_left_a_job_is_started_again_after_the_next_one(
    jobs: Jobs, plan: ReplicaPlan, tmp_path: Path
) -> None:
    engine = SlurmEngine()
    jobs.put("7", "COMPLETING")
    write_job(tmp_path, "7")
    leave_job(tmp_path, "7")
    second = engine.start(plan)
    jobs.put(second.id, "FAILED")
    engine.remove(second)
    third = engine.start(plan)
    assert third.id not in ("7", second.id)
    assert (third.state, jobs.submitted()) == (InstanceState.STARTING, 2)


@pytest.mark.parametrize(
    ("state", "reason", "is_on_its_way"),
    [
        ("PENDING", "None", True),
        ("PENDING", "Resources", False),
        ("CONFIGURING", "None", True),
        ("RUNNING", "None", True),
        ("SUSPENDED", "None", False),
    ],
)
def test_a_job_is_on_its_way_unless_slurm_has_a_reason(
    jobs: Jobs, plan: ReplicaPlan, state: str, reason: str, is_on_its_way: bool
) -> None:
    jobs.put("7", state)
    jobs.rows["7"] = replace(jobs.rows["7"], reason=reason)
    found = found_by(SlurmEngine(), plan)
    assert (found.state, found.is_on_its_way) == (InstanceState.STARTING, is_on_its_way)


def test_a_job_with_a_short_limit_is_not_replaced_as_soon_as_it_begins(
    jobs: Jobs, plan: ReplicaPlan, tmp_path: Path
) -> None:
    jobs.put("7", "RUNNING", left=120.0)
    report(tmp_path)
    found = found_by(SlurmEngine(), plan)
    assert found.ends_at is not None
    assert found.replace_at == found.ends_at - 80


def test_when_a_job_ends_is_told_by_a_clock_that_no_step_moves_and_again_when_it_moves(
    jobs: Jobs, plan: ReplicaPlan, tmp_path: Path
) -> None:
    jobs.put("7", "RUNNING", left=120.0)
    report(tmp_path)
    engine = SlurmEngine()
    changes = engine.changes()
    next(changes)
    found = found_by(engine, plan)
    assert found.ends_at is not None
    assert 60 < found.ends_at - boot_seconds() <= 120.5
    jobs.put("7", "RUNNING", left=3600.0)
    next(changes)


def test_a_requeue_that_is_seen_when_the_job_runs_again_has_a_reason(
    jobs: Jobs, plan: ReplicaPlan, tmp_path: Path
) -> None:
    jobs.put("7", "RUNNING")
    report(tmp_path, runs=1)
    found = found_by(SlurmEngine(), plan)
    assert (found.runs, found.why_anew) == (1, "Slurm has requeued job 7")


def test_a_silent_job_that_is_stopped_has_its_grace(
    jobs: Jobs, plan: ReplicaPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_table, "SILENT_SECONDS", 0.0)
    jobs.put("7", "RUNNING")
    report(tmp_path)
    engine = SlurmEngine()
    found = found_by(engine, plan)
    assert found.is_silent
    engine.stop(found, 20.0)
    assert jobs.commands == [("scancel", "--batch", f"--signal={signal.SIGTERM:d}", "7")]
    assert left_jobs(tmp_path) == []


def test_a_job_that_waits_may_go_to_a_lost_node_again_when_what_was_left_there_has_ended(
    jobs: Jobs, plan: ReplicaPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "FRESH_SECONDS", 0.0)
    jobs.put("7", "COMPLETING")
    leave_job(tmp_path, "7")
    plan = replace(plan, options={"exclude": "n5"})
    engine = SlurmEngine()
    engine.start(plan)
    assert "--exclude=n5,n1" in jobs.commands[0]
    engine.find(plan)
    engine.list()
    assert len(jobs.commands) == 1
    jobs.put("7", "CANCELLED")
    for _ in range(2):
        engine.list()
        engine.find(plan)
    assert jobs.commands[1:] == [("scontrol", "update", "jobid=8", "ExcNodeList=n5")]
