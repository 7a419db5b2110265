# SPDX-License-Identifier: Apache-2.0
"""Keeps the facts about this user's jobs: Slurm's last answer, and the reports of the jobs.

    squeue, at most every FRESH_SECONDS ──▶ rows ─┬─▶ has it ended? when will it?
    JOB.json in the replica's folder ──▶ reports ─┴─▶ is it silent, lost, left?

A job is *silent* when it should be running and sends no heartbeats; *lost* when it runs and Slurm
does not know it; *left* when it could not be killed and no replica has it any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from ....system.process.process_identity import boot_seconds
from ..base import EngineGone, EngineRefused
from . import commands
from .commands import ENDED, Row
from .job import HEARTBEAT_SECONDS, JobReport, forget_job, leave_job, left_jobs, read_job

POLL_INTERVAL_SECONDS = 2.0  # between two questions to slurmctld
FRESH_SECONDS = 0.3  # for which an answer is as good as new
END_SECONDS = 0.1  # between two checks whether a job has ended
SILENT_SECONDS = 4 * HEARTBEAT_SECONDS  # without a heartbeat, after which a job is silent
LOST_SECONDS = 3 * HEARTBEAT_SECONDS  # without a heartbeat, after which a lost job has ended
STEADY_SECONDS = 5.0  # by which an end may seem to move: Slurm reports whole seconds

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
        self._heartbeats: dict[str, tuple[int, float]] = {}  # the last of each job, and its time
        self._lost: set[str] = set()
        self._left: set[str] = set()
        self._ends: dict[str, float] = {}  # when the time limits of jobs are over: `boot_seconds`
        # The user's own `exclude` of jobs that avoid others' nodes; None: they do no more.
        self._avoiding: dict[str, str | None] = {}

    @property
    def has_lost(self) -> bool:
        """Return whether any job runs that Slurm does not know."""
        return bool(self._lost)

    def rows(self, seconds: float) -> dict[str, Row]:
        """Return all jobs, by their ids, as they were at most `seconds` ago.

        Raises:
            EngineGone
        """
        wanted_since = time.monotonic() - seconds
        with self._lock:  # several who wait have one answer
            if self._asked_at < max(wanted_since, self._changed_at):
                self._ask()
            if self._problem is not None:
                raise self._problem
            return self._rows

    def add(self, job: str, run_dir: Path) -> None:
        """Add a job that was just submitted; an answer from before does not count any more."""
        self._folders[job] = run_dir
        self._changed_at = time.monotonic()

    def add_forgotten(self, job: str, run_dir: Path, report: JobReport | None) -> bool:
        """Add a job that Slurm does not know; return whether it is over. Otherwise it is lost."""
        self._folders[job] = run_dir
        if report is None or self.is_over(report):
            self._lost.discard(job)
            return True
        self._lost.add(job)
        return False

    def avoid_left(self, job: str, excluded: str) -> None:
        """Note that a job waits and avoids nodes where others were left.

        It gets the user's own `exclude` back when these nodes are free.
        """
        self._avoiding.setdefault(job, excluded)

    def leave(self, row: Row) -> None:
        """Count a job as its replica's no more."""
        with contextlib.suppress(OSError):  # the folder is gone
            leave_job(row.run_dir, row.id)
        self._left.add(row.id)

    def forget(self, job: str) -> None:
        """Drop a job, also in its replica's folder."""
        if (folder := self.folder(job)) is not None:
            forget_job(folder, job)
        self._lost.discard(job)
        for known in (self._folders, self._heartbeats, self._avoiding):
            known.pop(job, None)

    def folder(self, job: str) -> Path | None:
        """Return the folder of a job's replica."""
        if job not in self._folders:
            self.rows(0.0)
        return self._folders.get(job)

    def ends_at(self, job: str) -> float | None:
        """Return when a job's time limit is over, as `boot_seconds`."""
        return self._ends.get(job)

    def nodes_away(self, run_dir: Path) -> tuple[str, ...]:
        """Return the nodes where jobs were left that have not ended, as far as Slurm knows."""
        rows = [self._rows[job] for job in left_jobs(run_dir) if job in self._rows]
        return tuple(sorted({row.node for row in rows if row.state not in ENDED and row.node}))

    def is_of_replica(self, row: Row) -> bool:
        """Return whether a job is still its replica's: it has not ended, or its folder says so."""
        if row.id in self._left:
            return False
        return row.state not in ENDED or read_job(row.run_dir) == row.id

    def is_over(self, report: JobReport) -> bool:
        """Return whether a job that Slurm does not know has ended: it wrote so, or is silent."""
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
        return job not in self._lost if row is None else row.state in ENDED

    def wait_for_end(self, job: str, seconds: float) -> bool:
        """Wait at most `seconds` until a job has ended; return whether it has."""
        deadline = time.monotonic() + seconds
        while not self.has_ended(job, END_SECONDS):
            if time.monotonic() >= deadline:
                return False
            time.sleep(END_SECONDS)
        return True

    def _ask(self) -> None:
        """Ask Slurm. No answer is an answer, too: it takes Slurm long not to give one."""
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
        """Keep of a job what is not asked for again."""
        if row.id not in self._folders:
            self._folders[row.id] = row.run_dir
            self._left.update(left_jobs(row.run_dir))
        if row.left_seconds is None:
            self._ends.pop(row.id, None)
            return
        ends_at = boot_seconds() + row.left_seconds
        if abs(ends_at - self._ends.get(row.id, 0.0)) > STEADY_SECONDS:
            self._ends[row.id] = ends_at

    def _end_avoiding(self) -> None:
        """Allow jobs that wait to go to a node where a job was left, once that has ended."""
        for job, excluded in list(self._avoiding.items()):
            row = self._rows.get(job)
            if excluded is None or row is None or row.state != PENDING:
                continue
            if not self.nodes_away(row.run_dir):
                with contextlib.suppress(EngineRefused):  # it has just begun
                    commands.run("scontrol", "update", f"jobid={job}", f"ExcNodeList={excluded}")
                self._avoiding[job] = None

    def _silent_seconds(self, report: JobReport) -> float:
        now = time.monotonic()
        heartbeats, since = self._heartbeats.get(report.job, (-1, now))
        if heartbeats != report.heartbeats:
            self._heartbeats[report.job] = (report.heartbeats, now)
            return 0.0
        return now - since
