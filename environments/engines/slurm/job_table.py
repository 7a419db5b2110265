# SPDX-License-Identifier: Apache-2.0
"""`JobTable`: the facts about this user's jobs, from Slurm's last answer and the jobs' own reports.

    squeue, at most every FRESH_SECONDS ──▶ rows ─┬─▶ has it ended? when will it?
    JOB.json in the replica's folder ──▶ reports ─┴─▶ is it silent, lost, left?

A job is *silent* if it should be running and sends no heartbeats. It is *lost* if it runs and Slurm
does not know it. It is *left* if it could not be killed, and its replica has abandoned it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from ....system.process.process_identity import boot_seconds
from ..base import EngineGone, EngineRefused, wait_until
from . import commands
from .commands import ENDED, Row
from .job import HEARTBEAT_SECONDS, JobReport, forget_job, leave_job, left_jobs, read_job

POLL_INTERVAL_SECONDS = 2.0  # between two questions to slurmctld
FRESH_SECONDS = 0.3  # for which an answer counts as fresh
END_SECONDS = 0.1  # between two checks whether a job has ended
SILENT_SECONDS = 4 * HEARTBEAT_SECONDS  # without a heartbeat: the job is silent
LOST_SECONDS = 3 * HEARTBEAT_SECONDS  # without a heartbeat: a lost job has ended
STEADY_SECONDS = 5.0  # a smaller change of an end is taken for rounding by Slurm

PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
STARTED = frozenset({RUNNING, COMPLETING, "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})


class JobTable:
    """The jobs of this user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}  # by job; as of the last question
        self._asked_at = self._changed_at = float("-inf")
        self._problem: EngineGone | None = None
        self._folders: dict[str, Path] = {}  # of jobs that were seen
        self._heartbeats: dict[str, tuple[int, float]] = {}  # the last one of a job, and its time
        self.lost: set[str] = set()  # jobs that run without Slurm knowing that
        self._left: set[str] = set()
        self.ends: dict[str, float] = {}  # of jobs' time limits, in `boot_seconds`, if known
        # The user's own `exclude` option of jobs that avoid nodes of left jobs; None: restored.
        self._avoiding: dict[str, str | None] = {}

    def rows(self, seconds: float) -> dict[str, Row]:
        """Return all jobs, by their ids, as they were at most `seconds` ago.

        Raises:
            EngineGone
        """
        wanted_since = time.monotonic() - seconds
        with self._lock:  # threads that wait share an answer
            if self._asked_at < max(wanted_since, self._changed_at):
                self._ask()
            if self._problem is not None:
                raise self._problem
            return self._rows

    def add(self, job: str, run_dir: Path) -> None:
        """Add a job that was just submitted; earlier answers do not count any more."""
        self._folders[job] = run_dir
        self._changed_at = time.monotonic()

    def add_forgotten(self, job: str, run_dir: Path, report: JobReport | None) -> bool:
        """Add a job that Slurm does not know; return whether it is over. Otherwise it is lost."""
        self._folders[job] = run_dir
        if report is None or self.is_over(report):
            self.lost.discard(job)
            return True
        self.lost.add(job)
        return False

    def avoid_left(self, job: str, excluded: str) -> None:
        """Record that a waiting job avoids nodes where jobs were left.

        Its `exclude` option becomes the user's own again when these jobs have ended.
        """
        self._avoiding.setdefault(job, excluded)

    def leave(self, row: Row) -> None:
        """Count a job as left, and record that in its replica's folder."""
        with contextlib.suppress(OSError):  # the folder is gone
            leave_job(row.run_dir, row.id)
        self._left.add(row.id)

    def forget(self, job: str) -> None:
        """Remove a job, also from its replica's folder."""
        if (folder := self.folder(job)) is not None:
            forget_job(folder, job)
        self.lost.discard(job)
        for known in (self._folders, self._heartbeats, self._avoiding):
            known.pop(job, None)

    def folder(self, job: str) -> Path | None:
        """Return the folder of a job's replica."""
        if job not in self._folders:
            self.rows(0.0)
        return self._folders.get(job)

    def nodes_away(self, run_dir: Path) -> tuple[str, ...]:
        """Return the nodes of left jobs that have not ended, as far as Slurm knows."""
        rows = [self._rows[job] for job in left_jobs(run_dir) if job in self._rows]
        return tuple(sorted({row.node for row in rows if row.state not in ENDED and row.node}))

    def is_of_replica(self, row: Row) -> bool:
        """Return whether a job is its replica's: it runs, or the replica's folder names it."""
        if row.id in self._left:
            return False
        return row.state not in ENDED or read_job(row.run_dir) == row.id

    def is_over(self, report: JobReport) -> bool:
        """Return whether a job that Slurm does not know has ended: it says so, or is silent."""
        return report.exit_code is not None or self._silent_seconds(report) >= LOST_SECONDS

    def is_silent(self, row: Row, report: JobReport | None) -> bool:
        """Return whether a job that should be running has sent no heartbeat for long."""
        if report is None or row.state not in (RUNNING, COMPLETING):
            return False
        return self._silent_seconds(report) >= SILENT_SECONDS

    def has_ended(self, job: str, seconds: float) -> bool:
        """Return whether a job has ended, by an answer that is at most `seconds` old."""
        if job in self._left:
            return True
        row = self.rows(seconds).get(job)
        return job not in self.lost if row is None else row.state in ENDED

    def wait_for_end(self, job: str, seconds: float) -> bool:
        """Wait at most `seconds` until a job has ended; return whether it has."""
        return wait_until(lambda: self.has_ended(job, END_SECONDS), seconds, END_SECONDS)

    def _ask(self) -> None:
        """Ask Slurm, and keep its answer; or its silence, which takes long to find out."""
        self._asked_at = time.monotonic()
        try:
            self._rows = {row.id: row for row in commands.jobs()}
            for row in self._rows.values():
                self._keep(row)
            self._end_avoiding()
            self._problem = None
        except EngineGone as exc:
            self._problem = exc

    def _keep(self, row: Row) -> None:
        """Record facts about a job that later answers may not have."""
        if row.id not in self._folders:
            self._folders[row.id] = row.run_dir
            self._left.update(left_jobs(row.run_dir))
        if row.left_seconds is None:
            self.ends.pop(row.id, None)
            return
        ends_at = boot_seconds() + row.left_seconds
        if abs(ends_at - self.ends.get(row.id, 0.0)) > STEADY_SECONDS:
            self.ends[row.id] = ends_at

    def _end_avoiding(self) -> None:
        """Restore the `exclude` option of waiting jobs, once the left jobs have ended."""
        for job, excluded in list(self._avoiding.items()):
            row = self._rows.get(job)
            if excluded is None or row is None or row.state != PENDING:
                continue
            if not self.nodes_away(row.run_dir):
                with contextlib.suppress(EngineRefused):  # the job has just begun
                    commands.run("scontrol", "update", f"jobid={job}", f"ExcNodeList={excluded}")
                self._avoiding[job] = None

    def _silent_seconds(self, report: JobReport) -> float:
        now = time.monotonic()
        heartbeats, since = self._heartbeats.get(report.job, (-1, now))
        if heartbeats != report.heartbeats:
            self._heartbeats[report.job] = (report.heartbeats, now)
            return 0.0
        return now - since
