# SPDX-License-Identifier: Apache-2.0
"""Slurm: a job for each replica, by Slurm's own commands; no library.

    agent ──sbatch, squeue, scancel──▶ slurmctld ──▶ a node ──▶ the job's script
      ▲                                                            │ exec
      └─ the replica's folder ◀─ address, heartbeats, exit ── job.py ──▶ env host
           (a file system that all nodes see)

A job's comment has the replica's labels, as JSON. `squeue` lists all jobs of this user at once, at
most every `POLL_INTERVAL_SECONDS`, since slurmctld serves every user.

Slurm forgets a job some minutes after its end (`MinJobAge`), and not on request. So a job that has
ended belongs to a replica as long as the replica's folder says so (`job.py`). Once it is forgotten,
its own report in the folder counts.

    engine.py      the engine; options.py: arguments of sbatch
    job_table.py   the facts about jobs
    commands.py    Slurm's commands, and explanations of how jobs ended
    job.py         the program on the node, and the files in the replica's folder

Failure cases

    the agent is killed in `sbatch`    the next agent finds the job by its comment. Of two jobs of
                                       the same name, Slurm runs one at a time (`singleton`), and
                                       the later one is cancelled
    slurmctld is restarted, or away    jobs continue; `EngineGone` until it answers
    slurmctld is killed                it may have lost jobs that run, or list them as waiting:
                                       their heartbeats show that they run, and a note in the
                                       folder makes them end
    a node is lost                     heartbeats and answers stop, long before NODE_FAIL, and the
                                       job is abandoned. Slurm cancels it when the node is back, and
                                       it ends by itself when it finds that it is not the replica's
                                       any more. The next job does not wait for it, and avoids its
                                       node while it may still run
    the time limit comes near          a successor is requested (`reconcile/own_requests.py`) before
                                       Slurm sends SIGUSR1, by which the replica drains
    the folder is not seen by nodes    the job cannot write: it is RUNNING, and has no address
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ....system.net.access import is_loopback
from .. import base
from ..host_options import check_nodes
from . import commands, job_table
from .commands import ENDED, Row, exit_facts, over_memory
from .job import NO_JOB, OUTPUT_FILE_NAME, left_jobs, read_job, read_report, write_job
from .options import job_script, sbatch_arguments, warned_seconds

OUTPUT_SECONDS = 0.3  # between two reads of what a job has printed
KILL_SECONDS = 60.0  # for Slurm to kill a job: the default of its `UnkillableStepTimeout`
LEAVE_SECONDS = 2.0  # for Slurm to kill a silent job, before the job is abandoned
EARLY_SECONDS = 30.0  # how much earlier than requested Slurm may send a signal
LATEST_SHARE = 2 / 3  # of a job's time limit: a successor is not requested before this is left
CHECK_SECONDS = 10.0
READ_BYTES = 256 * 1024

CONFIGURING = "CONFIGURING"
_NOT_CONSIDERED = frozenset({"", "None"})  # reasons of a job that was not scheduled yet
_NO_LIMITS = (
    "nothing limits memory (TaskPlugin has no task/cgroup): a replica beyond its --memory is "
    "killed late (OverMemoryKill), or harms its node"
)


class SlurmEngine:
    """Runs replicas as jobs."""

    def __init__(self) -> None:
        self._jobs = job_table.JobTable()

    def check(self) -> base.Check:
        version = commands.run("sinfo", "--version", seconds=CHECK_SECONDS).split()[-1]
        config = commands.run("scontrol", "show", "config", seconds=CHECK_SECONDS)
        nodes = commands.nodes(CHECK_SECONDS)
        commands.run("sbatch", "--version", seconds=CHECK_SECONDS)
        if not any(node.is_up for node in nodes):
            text, remedy = "no node of this cluster is up", "see why: sinfo --list-reasons"
            return base.Check(version=version, problem=text, remedy=remedy)
        task = next((line for line in config.splitlines() if line.startswith("TaskPlugin ")), "")
        return base.Check(version=version, notes=() if "cgroup" in task else (_NO_LIMITS,))

    def list(self) -> Iterable[base.Instance]:
        """Return the jobs of this user that carry our labels and were not removed."""
        rows = self._jobs.rows(job_table.FRESH_SECONDS)
        return [self._instance(row) for row in rows.values() if self._jobs.is_of_replica(row)]

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        return self._find(plan, job_table.FRESH_SECONDS)

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        if (found := self._find(plan, 0.0)) is not None:
            return found
        job = self._submit(plan)
        try:
            write_job(Path(plan.run_dir), job)
        except OSError as exc:  # the replica was stopped meanwhile, or the disk is full
            commands.kill(job)
            text = f"the replica's folder cannot be written: {exc.strerror}"
            raise base.EngineRefused(text, "see whether its disk is full: df") from exc
        self._jobs.add(job, Path(plan.run_dir))
        return base.Instance(id=job, labels=plan.labels, state=base.InstanceState.STARTING)

    def signal(self, instance: base.Instance, number: int) -> None:
        """Send a signal to the job's first process, which passes it on to the server."""
        commands.cancel("--batch", f"--signal={number}", instance.id)

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        """Cancel a job: SIGTERM, and SIGKILL after the grace; one that waits is removed at once."""
        row = self._jobs.rows(0.0).get(instance.id)
        if row is None or row.state == job_table.PENDING:
            self._dismiss(instance.id)
        if row is None or self._jobs.has_ended(row.id, job_table.FRESH_SECONDS):
            return
        if row.state in job_table.STARTED and grace_seconds > 0:
            self.signal(instance, signals.SIGTERM)
            if self._jobs.wait_for_end(instance.id, grace_seconds):
                return
        is_silent = self._jobs.is_silent(row, read_report(row.run_dir, row.id))
        commands.kill(instance.id)
        seconds = LEAVE_SECONDS if is_silent else KILL_SECONDS
        if not self._jobs.wait_for_end(instance.id, seconds) and is_silent:
            self._jobs.leave(row)

    def remove(self, instance: base.Instance) -> None:
        """Kill a job if it still runs, and remove it from its replica's folder."""
        self.stop(instance, 0.0)
        self._jobs.forget(instance.id)

    def changes(self) -> Iterator[None]:
        """Yield whenever any job of ours has changed; Slurm has no events."""
        known: object = None
        while True:
            rows = self._jobs.rows(job_table.FRESH_SECONDS)
            seen = {
                each.id: (each.state, each.waiting, each.ends_at)
                for each in map(self._instance, rows.values())
            }
            if seen != known or self._jobs.lost:
                known = seen
                yield None
            time.sleep(job_table.POLL_INTERVAL_SECONDS)

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        """Yield the output of a job, from its file; a cursor is an offset in the file."""
        folder = self._jobs.folder(instance.id)
        if folder is None:
            return
        path = folder / OUTPUT_FILE_NAME.format(job=instance.id)
        offset = int(cursor or 0)
        while True:
            has_ended = self._jobs.has_ended(instance.id, job_table.POLL_INTERVAL_SECONDS)
            while data := _read(path, offset):
                offset += len(data)
                yield base.LogChunk(data=data, cursor=str(offset))
            if has_ended:
                return
            time.sleep(OUTPUT_SECONDS)

    def _submit(self, plan: base.ReplicaPlan) -> str:
        """Submit a job; return its id.

        The job avoids nodes where jobs of the replica were abandoned, if there are other nodes.
        """
        earlier = len(left_jobs(Path(plan.run_dir)))
        away = self._jobs.nodes_away(Path(plan.run_dir))
        arguments = sbatch_arguments(plan, earlier=earlier, avoided=away)
        nodes = (
            (node.gpus, None if is_loopback(node.address) else node.address)
            for node in commands.nodes(commands.COMMAND_SECONDS)
        )
        check_nodes(plan, plan.gpus, nodes, "look at what nodes have: sinfo -o '%N %G'")
        try:
            return commands.submit(arguments, job_script(plan))
        except base.EngineRefused:
            if not away:
                raise
            return commands.submit(sbatch_arguments(plan, earlier=earlier), job_script(plan))

    def _find(self, plan: base.ReplicaPlan, seconds: float) -> base.Instance | None:
        rows = self._jobs.rows(seconds).values()
        own = [row for row in rows if row.labels == plan.labels and self._jobs.is_of_replica(row)]
        if not own:
            return self._find_forgotten(plan)
        first, *others = sorted(own, key=lambda row: (row.state in ENDED, int(row.id)))
        for each in others:
            if each.state not in ENDED:
                commands.kill(each.id)
        if first.state not in ENDED and read_job(first.run_dir) != first.id:
            with contextlib.suppress(OSError):  # an agent was killed before it wrote that
                write_job(first.run_dir, first.id)
        if first.state == job_table.PENDING and left_jobs(first.run_dir):
            self._jobs.avoid_left(first.id, plan.options.get("exclude", ""))
        found = self._instance(first, is_whole=True)
        if found.ends_at is None:
            return found
        # The successor has as much time to start as sessions have to end, but at most a share of
        # the time limit, or each job with a short one would be replaced as soon as it begins.
        before = 2 * warned_seconds(plan.options) + EARLY_SECONDS
        before = min(before, LATEST_SHARE * (first.limit_seconds or 0.0))
        return replace(found, replace_at=found.ends_at - before)

    def _find_forgotten(self, plan: base.ReplicaPlan) -> base.Instance | None:
        """Return the job of a replica that Slurm does not know (any more).

        The job may still run: a controller that is killed loses what it has not saved.
        """
        run_dir = Path(plan.run_dir)
        job = read_job(run_dir)
        if job in (None, NO_JOB):
            return None
        instance = partial(base.Instance, id=job, labels=plan.labels)
        report = read_report(run_dir, job)
        if self._jobs.add_forgotten(job, run_dir, report):
            facts = exit_facts(job, {}, report)
            return instance(state=base.InstanceState.EXITED, exit=facts)
        assert report is not None
        return instance(
            state=base.InstanceState.RUNNING,
            pid=report.pid,
            address=report.address,
            waiting=f"Slurm has lost job {job}, which still runs on {report.node}",
        )

    def _instance(self, row: Row, *, is_whole: bool = False) -> base.Instance:
        """Return a job as an instance, with its exit if `is_whole`."""
        instance = partial(base.Instance, id=row.id, labels=row.labels)
        report = read_report(row.run_dir, row.id)
        # A controller that was killed may list a job as waiting that has run, and is over.
        is_over = row.state == job_table.PENDING and report and self._jobs.is_over(report)
        if row.state in ENDED or is_over:
            facts = None
            if is_whole:
                over = over_memory(row.run_dir, row.id)
                facts = exit_facts(row.id, commands.job_fields(row.id), report, over)
            return instance(state=base.InstanceState.EXITED, exit=facts)
        if report is None:
            return instance(
                state=base.InstanceState.STARTING,
                waiting=_why_waiting(row),
                # It is being started, or Slurm has not tried to schedule it.
                is_on_its_way=row.state in (CONFIGURING, job_table.RUNNING)
                or (row.state == job_table.PENDING and row.reason in _NOT_CONSIDERED),
            )
        is_silent = self._jobs.is_silent(row, report)
        problem = None
        if is_silent:
            seconds = f"{job_table.SILENT_SECONDS:g} s or more"
            problem = f"job {row.id} on {row.node} has not been heard of for {seconds}"
        elif row.state not in (job_table.RUNNING, job_table.COMPLETING):
            problem = f"Slurm: {row.state} ({row.reason})"
        return instance(
            state=base.InstanceState.RUNNING,
            pid=report.pid,
            address=report.address,
            ends_at=self._jobs.ends.get(row.id),
            is_silent=is_silent,
            waiting=problem,
        )

    def _dismiss(self, job: str) -> None:
        """Make a job end by itself, if it runs without Slurm knowing that."""
        folder = self._jobs.folder(job)
        report = None if folder is None else read_report(folder, job)
        if folder is None or report is None or self._jobs.is_over(report):
            return
        write_job(folder, NO_JOB)
        seconds, pause = 2 * job_table.LOST_SECONDS, job_table.END_SECONDS
        base.wait_until(
            lambda: self._jobs.is_over(read_report(folder, job) or report), seconds, pause
        )


def _why_waiting(row: Row) -> str:
    if row.state in job_table.STARTED:
        return f"job {row.id} runs on {row.node}, and has not reported its address yet"
    return f"Slurm: {row.state} ({row.reason}), job {row.id}"


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), READ_BYTES, offset)
    except FileNotFoundError:  # nothing was printed yet
        return b""
    except OSError as exc:
        raise base.EngineGone(f"{path} cannot be read: {exc.strerror}") from exc
