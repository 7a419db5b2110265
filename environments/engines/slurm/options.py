# SPDX-License-Identifier: Apache-2.0
"""Translates a replica's plan into arguments of `sbatch`, and the script that its job runs.

`--engine-option NAME=VALUE` becomes `--NAME=VALUE` of `sbatch`, or `--NAME` for `true`, which Slurm
itself checks. Options that openenvd decides are refused here. Pure functions.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping

from ....system.text.units import MB
from ..base import EngineEntry, EngineRefused, Preparation, ReplicaPlan
from ..host_options import check_no_sandbox
from .job import OUTPUT_FILE_NAME

# The program replaces the shell, so that it receives Slurm's signals.
SCRIPT = """\
#!/bin/sh
# A replica of {environment}, by openenvd.
exec {command}
"""
WARNED_SECONDS = 60  # before the time limit, for sessions to end; it is Slurm's default, too
# Options by which a job runs as a replica, is found, and is replaced. `sbatch` also takes the first
# letters of a name.
_OURS = frozenset(
    {"array", "chdir", "comment", "error", "export-file", "input", "job-name", "nodes", "ntasks"}
    | {"no-requeue", "open-mode", "output", "parsable", "requeue", "test-only", "wait"}
    | {"wait-all-nodes", "wrap"}
)
_TRUE, _FALSE = "true", "false"


def check_options(options: Mapping[str, str], *, sandbox: bool) -> None:
    """Refuse options that openenvd decides; Slurm checks the others. Raises `EngineRefused`."""
    check_no_sandbox("a Slurm job is a process of yours", sandbox=sandbox)
    for name in options:
        if name != "export" and any(ours.startswith(name) for ours in _OURS):
            text = f"--engine-option {name} is openenvd's own: by it jobs are found and replaced"
            raise EngineRefused(text, "leave it out")


def sbatch_arguments(
    plan: ReplicaPlan, *, earlier: int = 0, avoided: Iterable[str] = ()
) -> list[str]:
    """Return the arguments of `sbatch` that start a replica's job.

    Some `earlier` jobs may still run on nodes that do not answer: the new job has another name, so
    that it waits for none of them, and their nodes are `avoided`.

    The options were checked at the launch; `requeue`, which 0.2.0 accepted, is left out.
    """
    options: dict[str, str] = {
        "job-name": f"{plan.name}-{earlier}" if earlier else plan.name,
        "comment": json.dumps(plan.labels.to_labels(), separators=(",", ":")),
        "chdir": plan.run_dir,
        # Slurm must not replace a `%j` in the folder's own path.
        "output": f"{plan.run_dir.replace('%', '%%')}/{OUTPUT_FILE_NAME.format(job='%j')}",
        "open-mode": "append",
        "nodes": "1",
        "ntasks": "1",
        "export": "ALL",  # the few variables that `commands.run` passes on
        **_resources(plan),
        "signal": f"B:USR1@{WARNED_SECONDS}",
        **{name: value for name, value in plan.options.items() if not "requeue".startswith(name)},
        "no-requeue": _TRUE,
    }
    if nodes := [*filter(None, [plan.options.get("exclude")]), *avoided]:
        options["exclude"] = ",".join(nodes)
    # An agent that is killed while it submits may leave a job that the next agent does not see yet.
    # So only one job of a name runs at a time.
    waits_for = ["singleton", *filter(None, [plan.options.get("dependency")])]
    options["dependency"] = ",".join(waits_for)
    return [
        f"--{name}" if value == _TRUE else f"--{name}={value}"
        for name, value in options.items()
        if value != _FALSE
    ]


def warned_seconds(options: Mapping[str, str]) -> float:
    """Return how long before its time limit a job begins to drain."""
    _, _, seconds = options.get("signal", "").partition("@")
    return float(seconds) if seconds.isdecimal() else WARNED_SECONDS


def job_script(plan: ReplicaPlan) -> str:
    """Return the script of a replica's job. Slurm keeps a copy, so it contains no secret."""
    program = [sys.executable, "-P", "-m", f"{__package__}.job", plan.run_dir]
    return SCRIPT.format(environment=plan.labels.environment, command=shlex.join(program))


def _resources(plan: ReplicaPlan) -> dict[str, str]:
    found = {}
    if plan.memory_bytes:
        found["mem"] = f"{math.ceil(plan.memory_bytes / MB)}M"
    if plan.cpus:
        found["cpus-per-task"] = str(math.ceil(plan.cpus))
    if plan.gpus and not {"gres", "gpus", "gpus-per-node"} & set(plan.options):
        found["gres"] = f"gpu:{plan.gpus}"
    return found


ENGINE = EngineEntry(
    "openenvd.environments.engines.slurm.engine:SlurmEngine",
    Preparation.PROGRAM,
    # The variable that leads Slurm's commands to a cluster; empty: /etc/slurm.
    address=lambda environ: {"SLURM_CONF": environ.get("SLURM_CONF", "")},
    check_options=check_options,
    has_own_addresses=True,
)
