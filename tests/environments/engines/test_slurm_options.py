# SPDX-License-Identifier: Apache-2.0
"""A plan as arguments of `sbatch`, what a job's end means, and how a failing command is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.agent.engine_watch import exit_reason
from openenvd.environments.engines.base import EngineGone, EngineRefused, Labels, ReplicaPlan
from openenvd.environments.engines.slurm import commands as slurm_commands
from openenvd.environments.engines.slurm.commands import exit_facts, over_memory, read_duration
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
    job_script,
    sbatch_arguments,
    warned_seconds,
)
from openenvd.system.text.units import MB

LABELS = Labels("home", "echo", "echo-0-abc", "abc")


def plan_of(**options: Any) -> ReplicaPlan:
    return ReplicaPlan(
        labels=LABELS, image="", host="127.0.0.1", port=8000, run_dir="/shared/run/a%b", **options
    )


def test_a_plan_is_limits_labels_and_a_job_that_slurm_does_not_requeue() -> None:
    arguments = sbatch_arguments(plan_of(memory_bytes=300 * MB + 1, cpus=1.5, gpus=2))
    assert {"--mem=301M", "--cpus-per-task=2", "--gres=gpu:2", "--no-requeue"} <= set(arguments)
    assert "--job-name=openenvd-echo-0-abc" in arguments
    assert "--dependency=singleton" in arguments
    [comment] = [each for each in arguments if each.startswith("--comment=")]
    assert Labels.of(json.loads(comment.partition("=")[2])) == LABELS


def test_what_looks_like_a_pattern_in_a_path_is_not_replaced() -> None:
    assert "--output=/shared/run/a%%b/slurm-%j.out" in sbatch_arguments(plan_of())


def test_options_are_passed_on_as_they_are() -> None:
    options = {"partition": "gpu", "exclusive": "true", "gpus": "a100:1", "requeue": "true"}
    arguments = sbatch_arguments(plan_of(gpus=1, options={**options, "dependency": "afterok:7"}))
    assert {"--partition=gpu", "--exclusive", "--gpus=a100:1", "--requeue"} <= set(arguments)
    assert "--dependency=singleton,afterok:7" in arguments
    assert not {"--no-requeue", "--gres=gpu:1"} & set(arguments)


def test_a_job_with_a_time_limit_is_warned_of_its_end() -> None:
    assert "--signal=B:USR1@60" in sbatch_arguments(plan_of(options={"time": "1:00:00"}))
    asked = {"time": "1:00:00", "signal": "B:USR1@300"}
    assert "--signal=B:USR1@300" in sbatch_arguments(plan_of(options=asked))


def test_each_job_is_warned_as_its_partition_may_have_a_limit() -> None:
    assert "--signal=B:USR1@60" in sbatch_arguments(plan_of())
    assert warned_seconds({}) == 60
    assert warned_seconds({"signal": "B:USR1@300"}) == 300


def test_a_job_does_not_wait_for_one_that_was_left_and_goes_elsewhere() -> None:
    plan = plan_of(options={"exclude": "n1"})
    arguments = sbatch_arguments(plan, earlier=2, avoided=["n2", "n3"])
    assert f"--job-name={plan.name}-2" in arguments
    assert "--exclude=n1,n2,n3" in arguments


@pytest.mark.parametrize("text", ["1:00:00", "60:00", "3600", "0-01:00:00"])
def test_a_duration_of_slurm_is_seconds(text: str) -> None:
    assert read_duration(text) == 3600


def test_what_has_no_limit_has_no_duration() -> None:
    assert [read_duration(text) for text in ("UNLIMITED", "INVALID", "")] == [None] * 3


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


@pytest.mark.parametrize("name", ["job-name", "comment", "output", "array", "out", "wra", "job"])
def test_options_by_which_jobs_are_found_are_refused(name: str) -> None:
    with pytest.raises(EngineRefused, match=name):
        sbatch_arguments(plan_of(options={name: "x"}))


def test_a_sandbox_is_refused() -> None:
    with pytest.raises(EngineRefused, match="sandbox"):
        sbatch_arguments(plan_of(sandbox=True))


def test_the_script_tells_no_secret() -> None:
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
        ("PREEMPTED", "0:15", "was ended from outside: another job was to have its place"),
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
    ("file", "how"),
    [("", "without SLURM_CONF"), ("/etc/one.conf", "with SLURM_CONF=/etc/one.conf")],
)
def test_without_a_configuration_the_hint_names_the_variables_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, how: str
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat >&2 <<END\n{UNCONFIGURED}END\nexit 1\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", file)
    with pytest.raises(EngineGone) as raised:
        slurm_commands.run(str(sinfo))
    hint = str(raised.value.hint)
    assert hint.startswith(f"the daemon was started {how}: openenv stop, export SLURM_CONF=")
    assert hint.endswith("openenv up")
