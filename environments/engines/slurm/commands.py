# SPDX-License-Identifier: Apache-2.0
"""Runs Slurm's commands, and parses what they print; explains how a job ended.

The commands print text in formats that we specify, which is the same in all versions. (`--json` of
`squeue` 22.05 prints all jobs of the cluster, and its fields have changed with each version.)

An end is explained by Slurm's state if something else ended the job, and by the job's own report if
it ended by itself. OUT_OF_MEMORY only says that some process of the job was killed at some time. A
job that is killed because of `JobAcctGatherParams=OverMemoryKill` is FAILED or CANCELLED; only its
output says why.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....system.process.exit_reason import Detector
from ..base import EXIT_KILLED, FINE_EXITS, EngineGone, EngineRefused, ExitFacts, Labels
from .job import OUTPUT_FILE_NAME, JobReport, read_fields

COMMAND_SECONDS = 60.0  # the commands retry if the controller does not answer
INSTALL = "install Slurm's commands: apt install slurm-client, or run openenvd on a login node"
# The agent's variables that commands are passed, and through `sbatch` jobs: none is private.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH")
_OF_SLURM = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_", "MUNGE_")
_NODE_FORMAT = "NodeList:200,StateLong:200,Gres:200,NodeAddr:200"
_UP = ("idle", "mixed", "allocated", "completing")
_GPUS = re.compile(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)")
_JOB_FORMAT = "%i|%T|%r|%N|%L|%l|%k|%Z"  # the last may contain anything
_PING = "see whether it runs: scontrol ping"
# Parts of the messages of a Slurm that does not answer, in lower case, and the remedies.
_GONE = {
    "unable to contact slurm controller": _PING,
    "unable to contact the slurm controller": _PING,
    "munge": "see whether munge runs here: systemctl status munge",
    "socket timed out": "it is busy, and openenvd tries again",
    "connection refused": _PING,
    "connect failure": _PING,
    "communication connection failure": _PING,
    "in standby mode": _PING,
}
# Parts of the messages of a Slurm that has no configuration.
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
_PREFIX = re.compile(r"^[^:]*: (?:error|fatal): ")  # the command's name, and the kind
_NOT_THERE = ("invalid job id", "already completing", "already completed", "not running")


@dataclass(frozen=True, slots=True)
class Row:
    """One job, as `squeue` lists it."""

    id: str  # its number
    state: str  # in Slurm's word: PENDING, RUNNING, OUT_OF_MEMORY
    reason: str  # why it is pending or has ended; the text `None` if there is no reason
    node: str  # where it runs, or ran
    left_seconds: float | None  # how long it may still run; None: it does not run, or has no limit
    limit_seconds: float | None  # how long it may run in all; None: it has no limit
    labels: Labels  # the owner
    run_dir: Path  # the replica's folder


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    address: str
    is_up: bool  # whether it takes jobs
    gpus: int


def run(*command: str, stdin: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
    """Return the output of a command; raises `EngineRefused` if it fails.

    `EngineGone`: the command is not installed, or Slurm does not answer.
    """
    passed = (name for name in os.environ if name in _PASSED or name.startswith(_OF_SLURM))
    try:
        done = subprocess.run(
            command,
            input=stdin or "",
            env={name: os.environ[name] for name in passed if os.environ[name]},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as exc:
        raise EngineGone(f"there is no command {command[0]} here", INSTALL) from exc
    except subprocess.TimeoutExpired as exc:
        text = f"{command[0]} has not answered within {seconds:g} s"
        raise EngineGone(text, _PING) from exc
    if done.returncode != 0:
        raise _error(command[0], done.stderr or done.stdout)
    return done.stdout


def jobs() -> Iterator[Row]:
    """Yield this user's jobs that carry our labels, including those that have just ended.

    Raises:
        EngineGone
    """
    options = ("--noheader", "--states=all", f"--user={getpass.getuser()}")
    for line in run("squeue", *options, f"--format={_JOB_FORMAT}").splitlines():
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
    """Return a job's fields by their names in `scontrol`; empty if Slurm does not know the job."""
    try:  # text in the job's comment that looks like fields comes after Slurm's own
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
        found[name] = Node(address, is_up, sum(map(int, _GPUS.findall(gres))))
    return list(found.values())


def read_duration(text: str) -> float | None:
    """Read a duration such as `days-hours:minutes:seconds`, in seconds; None: it is not one."""
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
    return output.strip().partition(";")[0]  # the cluster's name may follow


def cancel(*arguments: str) -> None:
    """Run `scancel`; it is no error if the job has ended, or has not begun."""
    try:
        run("scancel", *arguments)
    except EngineRefused as exc:
        if not any(words in exc.message.lower() for words in _NOT_THERE):
            raise


def kill(job: str) -> None:
    """Kill a job at once, even if it waits or is being started."""
    cancel("--full", "--signal=KILL", job)
    cancel(job)


_NO_CONFIGURATION = "this machine has no Slurm configuration where Slurm looks for it; for another"


def _error(command: str, text: str) -> EngineGone | EngineRefused:
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    said = "; ".join(dict.fromkeys(lines)) or "it does not say why"
    lowered = said.lower()
    gone = next((hint for words, hint in _GONE.items() if words in lowered), None)
    if any(words in lowered for words in _UNCONFIGURED):
        # The daemon's variables are those of the shell that started it.
        file = os.environ.get("SLURM_CONF")
        why = f"the daemon was started with SLURM_CONF={file}" if file else _NO_CONFIGURATION
        gone = f"{why}: openenv stop, export SLURM_CONF=FILE, openenv up"
    if gone is not None:
        return EngineGone(f"Slurm does not answer: {said}", gone)
    hint = next((hint for words, hint in _HINTS.items() if words in lowered), None)
    return EngineRefused(f"{command}: {said}", hint)


TAIL_BYTES = 4096  # of a job's output, where Slurm says why it has killed the job
OUT_OF_MEMORY = "OUT_OF_MEMORY"
TIMEOUT = "TIMEOUT"
# States of jobs that did not end by themselves, and what ended them.
_ENDED_BY = {
    "BOOT_FAIL": "its node could not be booted",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline was over",
    "NODE_FAIL": "its node has failed",
    "PREEMPTED": "another job took its place",
    "REVOKED": "another cluster runs it",
    TIMEOUT: "its time limit was over",
}
ENDED = frozenset({"COMPLETED", "FAILED", OUT_OF_MEMORY, *_ENDED_BY})
_OOM_EXIT = 125  # the "signal" by which Slurm reports that memory ran out
_OVER_MEMORY = re.compile(rb"slurmstepd\S*: error: .* exceeded memory limit \((\d+) > \d+\)")


def exit_facts(
    job: str, fields: dict[str, str], report: JobReport | None, over: int | None = None
) -> ExitFacts:
    """Return how a job ended, by Slurm's fields of it and its own report.

    `over` is the memory at which Slurm's accounting killed it; None: that did not kill it.
    """
    state, seconds = fields.get("JobState", ""), read_duration(fields.get("RunTime", ""))
    node = fields.get("BatchHost") or (report.node if report is not None else "")
    where = f"job {job} on {node}" if node else f"job {job}"
    code = report.exit_code if report is not None else None
    if code is None:
        code = _slurm_exit(fields.get("ExitCode", ""))
    if over is not None:  # its state is FAILED or CANCELLED then
        return ExitFacts(
            exit_code=EXIT_KILLED,
            is_oom=True,
            detector=Detector.SLURM,
            seconds=seconds,
            peak_bytes=over,
            evidence=f"{where}, {state or 'ended'}, by OverMemoryKill",
        )
    if state in _ENDED_BY:
        return ExitFacts(
            ended_by=f"{_ENDED_BY[state]} ({where}, {state})",
            is_time_over=state == TIMEOUT,
            seconds=seconds,
        )
    if report is not None and report.exit is not None:
        reason = report.exit | ({"seconds": seconds} if seconds else {})
        return ExitFacts(exit_code=code, reason=reason)
    is_oom = state == OUT_OF_MEMORY and code not in FINE_EXITS
    return ExitFacts(
        exit_code=EXIT_KILLED if is_oom and code is None else code,
        is_oom=is_oom,
        seconds=seconds,
        evidence=f"{where}, {state}" if is_oom else None,
    )


def _slurm_exit(text: str) -> int | None:
    """Return an exit code, printed as `code:signal`, as a shell would have it; None: none."""
    code, _, number = text.partition(":")
    if not (code.isdecimal() and number.isdecimal()) or int(number) == _OOM_EXIT:
        return None
    return 128 + int(number) if int(number) else int(code)


def over_memory(run_dir: Path, job: str) -> int | None:
    """Return the memory at which Slurm's accounting killed a job, in bytes; None: it did not.

    With `JobAcctGatherParams=OverMemoryKill`, only the job's output says so.
    """
    path = run_dir / OUTPUT_FILE_NAME.format(job=job)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            found = _OVER_MEMORY.findall(file.read())
    except OSError:
        return None
    return int(found[-1]) if found else None
