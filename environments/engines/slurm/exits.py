# SPDX-License-Identifier: Apache-2.0
"""How a Slurm job ended: from Slurm's state, the job's own report, and its output.

Slurm's word counts where something else ended the job; the report's where it ended by itself.
OUT_OF_MEMORY says only that something in the job was ever killed: what has ended its server, the
job itself has found out, unless it was killed, too. What `JobAcctGatherParams=OverMemoryKill` kills
is FAILED or CANCELLED to Slurm: the output says why.
"""

from __future__ import annotations

import re
import signal as signals
from pathlib import Path

from ....system.process.exit_reason import Detector
from ..base import ExitFacts
from .commands import read_duration
from .files import OUTPUT_FILE_NAME, JobReport

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
    """Return how a job ended.

    Args:
        job: Its id.
        fields: What Slurm knows of it; empty: nothing any more.
        report: What it has said of itself.
        over: With how many bytes it was found beyond its memory.
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
    if not (code.isdecimal() and number.isdecimal()):
        return None
    if int(number) == _OOM_EXIT:
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
