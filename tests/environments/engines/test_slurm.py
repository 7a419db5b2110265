# SPDX-License-Identifier: Apache-2.0
"""Slurm's options, ends of jobs and commands; a list of jobs stands for Slurm."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.agent.engine_watch import exit_reason
from openenvd.environments.engines import base
from openenvd.environments.engines.slurm import commands as slurm_commands
from openenvd.environments.engines.slurm import job_table
from openenvd.environments.engines.slurm.commands import Row, exit_facts, over_memory, read_duration
from openenvd.environments.engines.slurm.engine import SlurmEngine
from openenvd.environments.engines.slurm.job import (
    NO_JOB,
    JobReport,
    forget_job,
    is_replaced,
    leave_job,
    left_jobs,
    read_job,
    write_job,
)
from openenvd.environments.engines.slurm.options import (
    check_options,
    job_script,
    sbatch_arguments,
    warned_seconds,
)
from openenvd.system.process.process_identity import boot_seconds
from openenvd.system.text.units import MB

LABELS = base.Labels("home", "echo", "echo-0-abc", "abc")


def plan_of(**options: Any) -> base.ReplicaPlan:
    return base.ReplicaPlan(
        labels=LABELS, image="", host="127.0.0.1", port=8000, run_dir="/shared/run/a%b", **options
    )


def test_a_plan_is_limits_labels_and_options_and_its_job_waits_for_none_that_was_left() -> None:
    arguments = sbatch_arguments(plan_of(memory_bytes=300 * MB + 1, cpus=1.5, gpus=2))
    assert {"--mem=301M", "--cpus-per-task=2", "--gres=gpu:2", "--no-requeue"} <= set(arguments)
    assert "--job-name=openenvd-echo-0-abc" in arguments
    assert "--dependency=singleton" in arguments
    assert "--output=/shared/run/a%%b/slurm-%j.out" in arguments  # its own is no pattern
    [comment] = [each for each in arguments if each.startswith("--comment=")]
    assert base.Labels.of(json.loads(comment.partition("=")[2])) == LABELS
    options = {"partition": "gpu", "exclusive": "true", "gpus": "a100:1"}
    arguments = sbatch_arguments(plan_of(gpus=1, options={**options, "dependency": "afterok:7"}))
    assert {"--partition=gpu", "--exclusive", "--gpus=a100:1"} <= set(arguments)
    assert "--dependency=singleton,afterok:7" in arguments
    assert "--gres=gpu:1" not in arguments
    plan = plan_of(options={"exclude": "n1"})
    arguments = sbatch_arguments(plan, earlier=2, avoided=["n2", "n3"])
    assert f"--job-name={plan.name}-2" in arguments
    assert "--exclude=n1,n2,n3" in arguments


@pytest.mark.parametrize("more", [{}, {"time": "1:00:00"}])
def test_each_job_is_warned_of_its_end_as_its_partition_may_have_one(more: dict[str, str]) -> None:
    for signalled, seconds in (({}, 60), ({"signal": "B:USR1@300"}, 300)):
        options = {**more, **signalled}
        assert f"--signal=B:USR1@{seconds}" in sbatch_arguments(plan_of(options=options))
        assert warned_seconds(options) == seconds


def test_a_duration_of_slurm_is_seconds_if_there_is_a_limit() -> None:
    assert {read_duration(text) for text in ("1:00:00", "60:00", "3600", "0-01:00:00")} == {3600}
    assert {read_duration(text) for text in ("UNLIMITED", "INVALID", "")} == {None}


def test_a_job_that_was_left_is_replaced_for_ever(tmp_path: Path) -> None:
    write_job(tmp_path, "7")
    leave_job(tmp_path, "7")
    assert is_replaced(tmp_path, "7")
    forget_job(tmp_path, "7")
    write_job(tmp_path, "8")
    assert is_replaced(tmp_path, "7")
    assert not is_replaced(tmp_path, "8")
    forget_job(tmp_path, "8")
    assert read_job(tmp_path) == NO_JOB
    assert is_replaced(tmp_path, "7")
    assert left_jobs(tmp_path) == ["7"]


@pytest.mark.parametrize("name", ["job-name", "comment", "output", "array", "wra", "requeue"])
def test_options_by_which_jobs_are_found_are_refused(name: str) -> None:
    with pytest.raises(base.EngineRefused, match=name):
        check_options({name: "x"}, sandbox=False)


@pytest.mark.parametrize("name", ["requeue", "requ"])
def test_a_job_of_an_environment_that_0_2_0_launched_to_be_requeued_is_not(name: str) -> None:
    arguments = sbatch_arguments(plan_of(options={name: "true", "time": "1:00:00"}))
    assert {"--no-requeue", "--time=1:00:00"} <= set(arguments)
    assert f"--{name}" not in arguments


def test_a_sandbox_is_refused_and_the_script_tells_no_secret() -> None:
    with pytest.raises(base.EngineRefused, match="sandbox"):
        check_options({}, sandbox=True)
    script = job_script(plan_of(env={"TOKEN": "hunter2"}))
    assert "hunter2" not in script
    assert "exec " in script


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        ("FAILED", "3:0", "exited with code 3"),
        ("FAILED", "0:9", "was killed by SIGKILL"),
        (
            "NODE_FAIL",
            "1:0",
            "was ended from outside: its node has failed (job 7 on n1, NODE_FAIL)",
        ),
        ("PREEMPTED", "0:15", "was ended from outside: another job took its place"),
        ("CANCELLED", "0:15", "was ended from outside: it was cancelled"),
        ("TIMEOUT", "0:0", "was stopped at its time-out: its time limit was over"),
        ("OUT_OF_MEMORY", "0:125", "was killed by the kernel for using too much memory"),
    ],
)
def test_a_state_of_slurm_is_an_exit_in_words(state: str, exit_code: str, expected: str) -> None:
    fields = {"JobState": state, "ExitCode": exit_code, "BatchHost": "n1", "RunTime": "1-00:00:02"}
    facts = exit_facts("7", fields, None)
    assert facts.seconds == 86402
    reason = exit_reason(facts, pid=5, stopped_by_us=False, limit_bytes=None)
    assert reason.sentence().startswith(expected)


def test_a_job_that_accounting_has_killed_is_out_of_memory(tmp_path: Path) -> None:
    output = tmp_path / "slurm-7.out"
    output.write_text("exceeded memory limit (9 > 8), being killed\n")
    assert over_memory(tmp_path, "7") is None  # its own words
    output.write_text(
        "loading\n"
        * 10_000
        + "slurmstepd-n1: error: StepId=7.batch exceeded memory limit (325734400 > 104857600), "
        "being killed\nslurmstepd-n1: error: Exceeded job memory limit\n"
    )
    assert over_memory(tmp_path, "7") == 325734400
    facts = exit_facts("7", {"JobState": "CANCELLED", "ExitCode": "0:9"}, None, 325734400)
    assert facts.is_oom
    assert (facts.exit_code, facts.peak_bytes, facts.ended_by) == (137, 325734400, None)
    assert over_memory(tmp_path, "8") is None


def test_a_server_that_ended_well_was_not_out_of_memory() -> None:
    """One of its processes was; it went on, and ended later."""
    report = JobReport(job="7", node="n1", host="n1", port=1, exit_code=0)
    facts = exit_facts("7", {"JobState": "OUT_OF_MEMORY", "ExitCode": "0:125"}, report)
    assert not facts.is_oom
    assert facts.exit_code == 0


UNCONFIGURED = """\
sinfo: error: fetch_config: DNS SRV lookup failed
sinfo: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("", "this machine has no Slurm configuration where Slurm looks for it; for another"),
        ("/etc/one.conf", "the daemon was started with SLURM_CONF=/etc/one.conf"),
    ],
)
def test_without_a_configuration_the_hint_names_the_variable_or_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, why: str
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat >&2 <<END\n{UNCONFIGURED}END\nexit 1\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", file)
    with pytest.raises(base.EngineGone) as raised:
        slurm_commands.run(str(sinfo))
    hint = str(raised.value.hint)
    assert hint.startswith(f"{why}: openenv stop, export SLURM_CONF=")
    assert hint.endswith("openenv up")


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


def found_by(engine: SlurmEngine, plan: base.ReplicaPlan) -> base.Instance:
    found = engine.find(plan)
    assert found is not None
    return found


def report(folder: Path, **fields: Any) -> None:
    JobReport(job="7", node="n1", host="n1", port=1, **fields).write(folder)


@pytest.fixture
def plan(tmp_path: Path) -> base.ReplicaPlan:
    return base.ReplicaPlan(
        labels=LABELS, image="", host="127.0.0.1", port=1, run_dir=str(tmp_path)
    )


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
    jobs: Jobs, plan: base.ReplicaPlan, state: str, reason: str, is_on_its_way: bool
) -> None:
    jobs.put("7", state)
    jobs.rows["7"] = replace(jobs.rows["7"], reason=reason)
    found = found_by(SlurmEngine(), plan)
    assert (found.state, found.is_on_its_way) == (base.InstanceState.STARTING, is_on_its_way)


def test_a_job_with_a_short_limit_is_not_replaced_as_soon_as_it_begins(
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path
) -> None:
    jobs.put("7", "RUNNING", left=120.0)
    report(tmp_path)
    found = found_by(SlurmEngine(), plan)
    assert found.ends_at is not None
    assert found.replace_at == found.ends_at - 80


def test_when_a_job_ends_is_told_by_a_clock_that_no_step_moves_and_again_when_it_moves(
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path
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


def test_a_silent_job_that_is_stopped_has_its_grace(
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_table, "FRESH_SECONDS", 0.0)
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


def test_a_report_that_a_job_of_0_2_0_writes_is_read(
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path
) -> None:
    jobs.put("7", "RUNNING")
    report(tmp_path)
    path = tmp_path / "slurm-7.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"runs": 0}))
    assert found_by(SlurmEngine(), plan).state is base.InstanceState.RUNNING


def test_a_job_whose_folder_is_gone_is_cancelled(jobs: Jobs, plan: base.ReplicaPlan) -> None:
    """As when a replica is stopped while it is started."""
    with pytest.raises(base.EngineRefused, match="folder cannot be written"):
        SlurmEngine().start(replace(plan, run_dir=f"{plan.run_dir}/gone"))
    assert jobs.commands[-1][0] == "scancel"


def test_a_job_that_slurm_lists_as_waiting_and_that_has_ended_is_over(
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path
) -> None:
    """As after a controller was killed that had not saved that the job ran."""
    jobs.put("7", "PENDING")
    report(tmp_path, exit_code=7)
    found = found_by(SlurmEngine(), plan)
    assert found.state is base.InstanceState.EXITED
    assert found.exit is not None
    assert found.exit.exit_code == 7


def test_a_job_that_slurm_has_forgotten_is_found_by_what_it_has_written(
    jobs: Jobs, plan: base.ReplicaPlan, tmp_path: Path
) -> None:
    write_job(tmp_path, "7")
    report(tmp_path, exit_code=7)
    facts = found_by(SlurmEngine(), plan).exit
    assert facts is not None
    assert facts.exit_code == 7
