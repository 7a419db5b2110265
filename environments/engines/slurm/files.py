# SPDX-License-Identifier: Apache-2.0
"""What Slurm's engine and its jobs tell each other: files in the replica's folder, which both see.

    slurm.json          by the engine: which job the replica has. Without it, a job that has ended
                        is none of the replica's: Slurm itself cannot forget one. A job that finds
                        itself replaced there ends: it was cut off, or Slurm has lost it. Also which
                        jobs were left on nodes that did not answer
    slurm-JOB.json      by the job: where it listens, how it is, and how it ended; whole at any time
    slurm-JOB.out       what the job has printed

Light: a job imports it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...shim.files import write_json
from ..host_options import http_address

BEAT_SECONDS = 5.0  # between two reports of a job
JOB_FILE_NAME = "slurm.json"
NO_JOB = ""  # stands there while a job that Slurm does not know is to end
OUTPUT_FILE_NAME = "slurm-{job}.out"


def report_name(job: str) -> str:
    """Return the name of a job's report."""
    return f"slurm-{job}.json"


@dataclass
class JobReport:
    """What a job says of itself.

    Attributes:
        job: Its id.
        node: The node that it runs on.
        host: The address of that node.
        port: The port that its server listens on there.
        pid: Its server, on that node.
        beats: Grows while the job lives: clocks of nodes may differ.
        exit_code: How the server ended, 128 + n for a signal; None: it has not.
        exit: The same as an `ExitReason`, with what the job's cgroup has counted.
        runs: How many times Slurm has requeued it.
    """

    job: str
    node: str
    host: str
    port: int
    pid: int | None = None
    beats: int = 0
    exit_code: int | None = None
    exit: dict[str, Any] | None = None
    runs: int = 0

    @property
    def address(self) -> str:
        """What goes into a URL."""
        return http_address(self.host, self.port)

    def write(self, run_dir: Path) -> None:
        """Replace what it said before; raises `OSError` when that fails."""
        write_json(str(run_dir / report_name(self.job)), asdict(self))


def read_report(run_dir: Path, job: str) -> JobReport | None:
    """Return what a job has said; None when it has said nothing yet, or cannot be read."""
    try:
        return JobReport(**json.loads((run_dir / report_name(job)).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def read_job(run_dir: Path) -> str | None:
    """Return the job that a replica has; None when it has none, or nobody may look."""
    return _read(run_dir)[0]


def left_jobs(run_dir: Path) -> list[str]:
    """Return the jobs that a replica has left on nodes that did not answer."""
    return _read(run_dir)[1]


def is_replaced(run_dir: Path, job: str) -> bool:
    """Whether a replica has certainly another job by now; one whose folder is gone has its own."""
    return read_job(run_dir) not in (None, job)


def write_job(run_dir: Path, job: str) -> None:
    """Note which job a replica has; raises `OSError` when that fails."""
    _write(run_dir, job, left_jobs(run_dir))


def leave_job(run_dir: Path, job: str) -> None:
    """Note that a replica has this job no more; raises `OSError` when that fails.

    It ends when it sees that, wherever it is.
    """
    _write(run_dir, NO_JOB, [*dict.fromkeys([*left_jobs(run_dir), job])])


def forget_job(run_dir: Path, job: str) -> None:
    """Remove everything that was written about a job, but that it was left."""
    names = [report_name(job), OUTPUT_FILE_NAME.format(job=job)]
    has, left = _read(run_dir)
    if not left and has in (job, NO_JOB):
        names.append(JOB_FILE_NAME)
    elif has == job:
        with contextlib.suppress(OSError):
            _write(run_dir, NO_JOB, left)
    for name in names:
        with contextlib.suppress(OSError):
            (run_dir / name).unlink()


def _read(run_dir: Path) -> tuple[str | None, list[str]]:
    try:
        data = json.loads((run_dir / JOB_FILE_NAME).read_bytes())
        return str(data["job"]), list(data["left"])
    except (OSError, ValueError, LookupError, TypeError):
        return None, []


def _write(run_dir: Path, job: str, left: list[str]) -> None:
    write_json(str(run_dir / JOB_FILE_NAME), {"job": job, "left": left}, sync=True)
