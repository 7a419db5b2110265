# SPDX-License-Identifier: Apache-2.0
"""Slurm's commands: run, and what they print as values.

Text in formats of our own is asked for rather than `--json`: it is the same in all versions, and
leaves out what is not asked for. (`squeue --json` of 22.05 prints all jobs of the cluster,
whichever are asked for, and its fields have changed with each version of its plug-in.)

How a Slurm job ended: from Slurm's state, the job's own report, and its output.

Slurm's word counts where something else ended the job; the report's where it ended by itself.
OUT_OF_MEMORY says only that something in the job was ever killed: what has ended its server, the
job itself has found out, unless it was killed, too. What `JobAcctGatherParams=OverMemoryKill` kills
is FAILED or CANCELLED to Slurm: the output says why.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal as signals
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....system.process.exit_reason import Detector
from ..base import EngineGone, EngineRefused, ExitFacts, Labels
from .job import OUTPUT_FILE_NAME, JobReport, read_fields

COMMAND_SECONDS = 60.0  # a controller that does not answer is asked several times by the commands
INSTALL = "install Slurm's commands: apt install slurm-client, or run openenvd on a login node"
# What commands, and through `sbatch` jobs, are passed of the agent's variables: nothing private.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH")
_OF_SLURM = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_", "MUNGE_")
_NODE_FORMAT = "NodeList:200,StateLong:200,Gres:200,NodeAddr:200"
_UP = ("idle", "mixed", "allocated", "completing")
_GPUS = re.compile(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)")
_JOB_FORMAT = "%i|%T|%r|%N|%L|%l|%k|%Z"  # the last may contain anything
# What Slurm complains about, in lower case, when it cannot be asked.
_GONE = {
    "unable to contact slurm controller": "see whether it runs: scontrol ping",
    "unable to contact the slurm controller": "see whether it runs: scontrol ping",
    "munge": "see whether munge runs here: systemctl status munge",
    "socket timed out": "it is busy: tried again",
    "connection refused": "see whether it runs: scontrol ping",
    "connect failure": "see whether it runs: scontrol ping",
    "communication connection failure": "see whether it runs: scontrol ping",
    "in standby mode": "see whether it runs: scontrol ping",
}
# The same, when it has no configuration.
_UNCONFIGURED = (
    "unable to process configuration file",
    "unable to establish configuration",
    "could not establish a configuration source",
)
_HINTS = {
    "invalid account": "name one of yours: --engine-option account=NAME (sacctmgr show assoc)",
    "invalid partition": "name another: --engine-option partition=NAME (sinfo)",
    "invalid qos": "name another: --engine-option qos=NAME",
    "time limit": "ask for less: --engine-option time=HOURS:00:00 (sinfo shows the most)",
    "memory specification": "ask for less --memory, or for another partition (sinfo -N -l)",
    "requested node configuration is not available": "no node is as large: sinfo -N -l",
    "invalid generic resource": "look at what nodes have: sinfo -o '%N %G'",
    "unrecognized option": "sbatch --help lists them",
    "invalid option": "sbatch --help lists them",
}
_PREFIX = re.compile(r"^[^:]*: (?:error|fatal): ")
_NOT_THERE = ("invalid job id", "already completing", "already completed", "not running")


@dataclass(frozen=True, slots=True)
class Row:
    """One job, as `squeue` lists it."""

    id: str  # its number
    state: str  # in Slurm's word: PENDING, RUNNING, OUT_OF_MEMORY
    reason: str  # why it is pending, or has ended so; `None` in words, if there is none
    node: str  # where it runs, or ran
    left_seconds: float | None  # how long it may run on; None: it does not run, or has no limit
    limit_seconds: float | None  # how long it may run in all; None: it has no limit
    labels: Labels  # whose it is
    run_dir: Path  # the replica's folder


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str
    address: str
    is_up: bool  # it takes jobs
    gpus: int


def run(*command: str, stdin: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
    """Return what a command prints.

    Raises:
        EngineGone: It is not installed, or Slurm does not answer.
        EngineRefused: It says no.
    """
    try:
        done = subprocess.run(
            command,
            input=stdin or "",
            env={
                name: value
                for name, value in os.environ.items()
                if value and (name in _PASSED or name.startswith(_OF_SLURM))
            },
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as exc:
        raise EngineGone(f"there is no command {command[0]} here", INSTALL) from exc
    except subprocess.TimeoutExpired as exc:
        text = f"{command[0]} has not answered within {seconds:g} s"
        raise EngineGone(text, "see whether it runs: scontrol ping") from exc
    if done.returncode != 0:
        raise _error(command[0], done.stderr or done.stdout)
    return done.stdout


def jobs() -> Iterator[Row]:
    """Yield this user's jobs that carry our labels, those that have just ended included.

    Raises:
        EngineGone
    """
    output = run(
        "squeue",
        "--noheader",
        "--states=all",
        f"--user={getpass.getuser()}",
        f"--format={_JOB_FORMAT}",
    )
    for line in output.splitlines():
        identity, state, reason, node, left, limit, comment, folder = line.split("|", 7)
        try:
            known = json.loads(comment)
        except ValueError:
            continue
        if isinstance(known, dict) and (labels := Labels.of(known)) is not None:
            seconds = read_duration(left) if state == "RUNNING" else None
            most = read_duration(limit)
            yield Row(identity, state, reason, node, seconds, most, labels, Path(folder))


def job_fields(job: str) -> dict[str, str]:
    """Return what Slurm knows of one job, by the names of `scontrol`; nothing of one it forgot.

    Raises:
        EngineGone
    """
    try:
        # Fields in the job's own comment come after Slurm's.
        return read_fields(run("scontrol", "--oneliner", "show", "job", job))
    except EngineRefused:
        return {}


def nodes(seconds: float) -> list[Node]:
    """Return all nodes, each once, however many partitions it is in."""
    output = run("sinfo", "--noheader", "--Node", f"--Format={_NODE_FORMAT}", seconds=seconds)
    found: dict[str, Node] = {}
    for line in filter(str.strip, output.splitlines()):
        name, state, gres, address = line.split()
        is_up = state.startswith(_UP) and not state.endswith("*")  # `*`: it does not answer
        found[name] = Node(name, address, is_up, sum(map(int, _GPUS.findall(gres))))
    return list(found.values())


def read_duration(text: str) -> float | None:
    """Read a duration of Slurm's, `days-hours:minutes:seconds` or less; None: it is none."""
    days, _, rest = text.rpartition("-")
    seconds = 0
    try:
        for part in rest.split(":"):
            seconds = 60 * seconds + int(part)
        return float(int(days or 0) * 86400 + seconds)
    except ValueError:
        return None


def submit(arguments: Sequence[str], script: str) -> str:
    """Submit a job; return its id."""
    output = run("sbatch", "--parsable", *arguments, stdin=script)
    return output.strip().partition(";")[0]  # and its cluster's name


def cancel(*arguments: str) -> None:
    """Run `scancel`; a job that does not run any more, or not yet, is no error."""
    try:
        run("scancel", *arguments)
    except EngineRefused as exc:
        if not any(words in exc.message.lower() for words in _NOT_THERE):
            raise


def kill(job: str) -> None:
    """Kill a job at once, also one that waits or starts."""
    cancel("--full", "--signal=KILL", job)
    cancel(job)


def _error(command: str, text: str) -> EngineGone | EngineRefused:
    # Without the command's name and `error:`.
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    said = "; ".join(dict.fromkeys(lines)) or "it does not say why"
    lowered = said.lower()
    gone = next((hint for words, hint in _GONE.items() if words in lowered), None)
    if any(words in lowered for words in _UNCONFIGURED):
        # The daemon has the variables of the shell that started it.
        file = os.environ.get("SLURM_CONF")
        how = f"with SLURM_CONF={file}" if file else "without SLURM_CONF"
        gone = (
            f"the daemon was started {how}: openenv stop, export SLURM_CONF=/path/to/slurm.conf, "
            "openenv up"
        )
    if gone is not None:
        return EngineGone(f"Slurm does not answer: {said}", gone)
    hint = next((hint for words, hint in _HINTS.items() if words in lowered), None)
    return EngineRefused(f"{command}: {said}", hint)


TAIL_BYTES = 4096  # of its output, where Slurm says why it has killed a job
OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
# Jobs that have ended, and what ended them, where they did not end by themselves.
_ENDED_BY = {
    "BOOT_FAIL": "its node could not be booted",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline was over",
    "NODE_FAIL": "its node has failed",
    "PREEMPTED": "another job was to have its place",
    "REVOKED": "another cluster runs it",
    TIMEOUT: "its time limit was over",
}
ENDED = frozenset({"COMPLETED", "FAILED", OUT_OF_MEMORY, *_ENDED_BY})
_OOM_EXIT = 125  # "signal" by which Slurm says that memory ran out
_OVER_MEMORY = re.compile(rb"slurmstepd\S*: error: .* exceeded memory limit \((\d+) > \d+\)")
_FINE_EXITS = (0, 128 + signals.SIGTERM)


def exit_facts(
    job: str, fields: dict[str, str], report: JobReport | None, over: int | None = None
) -> ExitFacts:
    """Return how a job ended, by what Slurm knows of it, and what it has said of itself.

    It was found beyond its memory with `over` bytes; None: it was not.
    """
    state = fields.get("JobState", "")
    node = fields.get("BatchHost") or (report.node if report is not None else "")
    where = f"job {job} on {node}" if node else f"job {job}"
    code = report.exit_code if report is not None else None
    if code is None:
        code = _slurm_exit(fields.get("ExitCode", ""))
    if over is not None:  # its state is FAILED or CANCELLED then, for whatever reason
        return ExitFacts(
            exit_code=128 + signals.SIGKILL,
            is_oom=True,
            detector=Detector.SLURM,
            seconds=read_duration(fields.get("RunTime", "")),
            peak_bytes=over,
            evidence=f"{where}, {state or 'ended'}, by OverMemoryKill",
        )
    if state in _ENDED_BY:
        return ExitFacts(
            ended_by=f"{_ENDED_BY[state]} ({where}, {state})",
            is_time_over=state == TIMEOUT,
            seconds=read_duration(fields.get("RunTime", "")),
        )
    if report is not None and report.exit is not None:
        seconds = read_duration(fields.get("RunTime", "")) or report.exit.get("seconds")
        return ExitFacts(exit_code=code, reason={**report.exit, "seconds": seconds})
    is_oom = state == OUT_OF_MEMORY and code not in _FINE_EXITS
    return ExitFacts(
        exit_code=128 + signals.SIGKILL if is_oom and code is None else code,
        is_oom=is_oom,
        seconds=read_duration(fields.get("RunTime", "")),
        evidence=f"{where}, {state}" if is_oom else None,
    )


def _slurm_exit(text: str) -> int | None:
    """Return an exit code of `scontrol`, `code:signal`, as a shell has it; None: no code."""
    code, _, number = text.partition(":")
    if not (code.isdecimal() and number.isdecimal()) or int(number) == _OOM_EXIT:
        return None
    return 128 + int(number) if int(number) else int(code)


def over_memory(run_dir: Path, job: str) -> int | None:
    """Return with how many bytes Slurm's own accounting has killed a job; None: it has not.

    It says so in the job's output alone, where `JobAcctGatherParams=OverMemoryKill` is set.
    """
    path = run_dir / OUTPUT_FILE_NAME.format(job=job)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            found = _OVER_MEMORY.findall(file.read())
    except OSError:
        return None
    return int(found[-1]) if found else None
