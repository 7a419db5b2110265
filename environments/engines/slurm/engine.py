# SPDX-License-Identifier: Apache-2.0
"""Slurm: a job for each replica, by Slurm's own commands; no library.

    agent ──sbatch, squeue, scancel──▶ slurmctld ──▶ a node ──▶ the job's script
      ▲                                                            │ exec
      └─── the replica's folder ◀── address, beats, exit ── job.py ──▶ env host
           (a file system that all nodes see)

Who a job belongs to stands in its comment, as JSON; `squeue` is asked for all jobs of this user at
once, at most every `POLL_INTERVAL_SECONDS`, however many replicas there are: slurmctld serves all.

Slurm cannot be made to forget a job, and forgets one by itself some minutes after its end
(`MinJobAge`). So a job that has ended is a replica's while the replica's folder says so
(`job.py`), and what the job has written there counts where Slurm knows nothing any more.

    engine.py      the engine; options.py: sbatch's
    commands.py    Slurm's commands, and how a job ended
    job.py         what runs on the node, and what both write into the folder

Failure cases

    the agent is killed in `sbatch`    the next one finds the job by its comment; of two, both
                                       called alike, Slurm runs one at a time (`singleton`), and the
                                       later one is cancelled
    slurmctld is restarted, or away    jobs go on; `EngineGone` until it answers
    slurmctld is killed                it may have lost jobs that run, or think that they wait:
                                       their beats say so, and that they are to end the folder
    a node is lost                     long before NODE_FAIL, there is no beat and no answer: the
                                       job is left. Slurm cancels it when the node is back, and it
                                       ends by itself when it sees that it is not the replica's any
                                       more. The next job does not wait for it, and goes elsewhere
                                       while it may still run
    the time limit comes near          its successor is asked for (`server/reconcile/successors.py`)
                                       before Slurm sends SIGUSR1: the replica is drained, and ends
    Slurm requeues a job               it is the same instance, in its next run
    the folder is not seen by nodes    the job cannot write: it is RUNNING, and has no address
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from ....system.net.access import is_loopback
from ....system.process.process_identity import boot_seconds
from ..base import (
    Check,
    EngineGone,
    EngineRefused,
    ExitFacts,
    Instance,
    InstanceState,
    LogChunk,
    ReplicaPlan,
)
from ..host_options import check_gpus, check_token
from . import commands
from .commands import ENDED, Row, exit_facts, over_memory
from .job import (
    BEAT_SECONDS,
    NO_JOB,
    OUTPUT_FILE_NAME,
    JobReport,
    forget_job,
    leave_job,
    left_jobs,
    read_job,
    read_report,
    write_job,
)
from .options import job_script, sbatch_arguments, warned_seconds

POLL_INTERVAL_SECONDS = 2.0  # between two questions to slurmctld
FRESH_SECONDS = 0.3  # for which an answer is as good as new
OUTPUT_SECONDS = 0.3  # between two looks at what a job has printed
END_SECONDS = 0.1  # between two looks whether a job has ended
KILL_SECONDS = 60.0  # for Slurm to end what it was told to kill: its own `UnkillableStepTimeout`
SILENT_SECONDS = 4 * BEAT_SECONDS  # without a beat, after which a job that runs is silent
LEAVE_SECONDS = 2.0  # for Slurm to kill a silent job, before it is left to itself
EARLY_SECONDS = 30.0  # by which Slurm may signal before the time that was asked for
LATEST_SHARE = 2 / 3  # of a job's time limit, which may be left when its successor is asked for
STEADY_SECONDS = 5.0  # by which an end may seem to move: Slurm tells whole seconds
LOST_SECONDS = 3 * BEAT_SECONDS  # without a beat, after which one that Slurm has lost has ended
CHECK_SECONDS = 10.0
READ_BYTES = 256 * 1024

PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
CONFIGURING = "CONFIGURING"
_STARTED = frozenset({RUNNING, COMPLETING, "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})
_NOT_CONSIDERED = frozenset({"", "None"})  # reasons of a job that the scheduler has not come to
_NO_LIMITS = (
    "nothing limits memory (TaskPlugin has no task/cgroup): a replica beyond its --memory is "
    "killed late (OverMemoryKill), or harms its node"
)


class SlurmEngine:
    """Runs replicas as jobs."""

    name: ClassVar[str] = "slurm"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}  # by job; as of the last question
        self._asked_at = self._changed_at = float("-inf")
        self._problem: EngineGone | None = None
        self._folders: dict[str, Path] = {}  # of jobs that were seen
        self._beats: dict[str, tuple[int, float]] = {}  # the last of each job, and when it came
        self._lost: set[str] = set()  # jobs that run, and that Slurm does not know
        self._left: set[str] = set()  # jobs that no replica has any more, on nodes that are away
        self._ends: dict[str, float] = {}  # when the time limits of jobs are over: `boot_seconds`
        # The user's own `exclude` of jobs that avoid others' nodes; None: they do no more.
        self._avoiding: dict[str, str | None] = {}

    # What there is

    def check(self) -> Check:
        """Tell whether jobs can be submitted here."""
        version = commands.run("sinfo", "--version", seconds=CHECK_SECONDS).split()[-1]
        config = commands.run("scontrol", "show", "config", seconds=CHECK_SECONDS)
        nodes = commands.nodes(CHECK_SECONDS)
        commands.run("sbatch", "--version", seconds=CHECK_SECONDS)
        if not any(node.is_up for node in nodes):
            text, remedy = "no node of this cluster is up", "see why: sinfo --list-reasons"
            return Check(version=version, problem=text, remedy=remedy)
        task = next((line for line in config.splitlines() if line.startswith("TaskPlugin ")), "")
        return Check(version=version, notes=() if "cgroup" in task else (_NO_LIMITS,))

    def list(self) -> Iterable[Instance]:
        """Return every job of this user that carries our labels and is not forgotten."""
        rows = self._look(FRESH_SECONDS)
        return [self._instance(row) for row in rows.values() if self._is_of_replica(row)]

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the job of a replica."""
        return self._find(plan, FRESH_SECONDS)

    # Its life

    def start(self, plan: ReplicaPlan) -> Instance:
        """Submit a job."""
        if (found := self._find(plan, 0.0)) is not None:
            return found
        job = self._submit(plan)
        try:
            write_job(Path(plan.run_dir), job)
        except OSError as exc:  # the replica was stopped meanwhile; the disk is full
            self._kill(job)
            text = f"the replica's folder cannot be written: {exc.strerror}"
            raise EngineRefused(text, "see whether its disk is full: df") from exc
        self._folders[job] = Path(plan.run_dir)
        self._changed_at = time.monotonic()  # a question that was asked before tells nothing of it
        return Instance(id=job, labels=plan.labels, state=InstanceState.STARTING)

    def _submit(self, plan: ReplicaPlan) -> str:
        """Submit a job; where one of the replica's was left only if there are no other nodes."""
        earlier = len(left_jobs(Path(plan.run_dir)))
        away = self._nodes_away(Path(plan.run_dir))
        arguments = sbatch_arguments(plan, earlier=earlier, avoided=away)
        _check_nodes(plan)
        try:
            return _sbatch(plan, arguments)
        except EngineRefused:
            if not away:
                raise
            return _sbatch(plan, sbatch_arguments(plan, earlier=earlier))

    def signal(self, instance: Instance, number: int) -> None:
        """Send a signal to the job's first process, which passes it on to its server."""
        try:
            commands.run("scancel", "--batch", f"--signal={number}", instance.id)
        except EngineRefused as exc:
            if not commands.is_not_there(exc):
                raise

    def stop(self, instance: Instance, grace_seconds: float) -> None:
        """Cancel a job: SIGTERM, and after the grace SIGKILL; one that waits goes at once."""
        row = self._look(0.0).get(instance.id)
        if row is None or row.state == PENDING:
            self._dismiss(instance.id)
        if row is None or row.state in ENDED or row.id in self._left:
            return
        if row.state in _STARTED and grace_seconds > 0:
            self.signal(instance, signals.SIGTERM)
            if self._has_ended_within(instance.id, grace_seconds):
                return
        if self._is_silent(row, read_report(row.run_dir, row.id)):
            self._leave(row)
            return
        self._kill(instance.id)
        self._has_ended_within(instance.id, KILL_SECONDS)

    def remove(self, instance: Instance) -> None:
        """Forget a job, which is killed if it still runs."""
        self.stop(instance, 0.0)
        folder = self._folder(instance.id)
        if folder is not None:
            forget_job(folder, instance.id)
        self._lost.discard(instance.id)
        self._folders.pop(instance.id, None)
        self._beats.pop(instance.id, None)
        self._avoiding.pop(instance.id, None)

    # What happens

    def changes(self) -> Iterator[None]:
        """Yield when any job of ours is otherwise than it was: Slurm has no events."""
        known: object = None
        while True:
            rows = self._look(FRESH_SECONDS)
            seen = {
                each.id: (each.state, each.waiting, each.ends_at, each.runs)
                for each in map(self._instance, rows.values())
            }
            if seen != known or self._lost:
                known = seen
                yield None
            time.sleep(POLL_INTERVAL_SECONDS)

    def logs(self, instance: Instance, cursor: str | None) -> Iterator[LogChunk]:
        """Yield what a job has printed, from its file; a cursor is an offset in it."""
        folder = self._folder(instance.id)
        if folder is None:
            return
        path = folder / OUTPUT_FILE_NAME.format(job=instance.id)
        offset = int(cursor or 0)
        while True:
            has_ended = self._has_ended(instance.id, POLL_INTERVAL_SECONDS)
            while data := _read(path, offset):
                offset += len(data)
                yield LogChunk(data=data, cursor=str(offset))
            if has_ended:
                return
            time.sleep(OUTPUT_SECONDS)

    # Inside

    def _look(self, seconds: float) -> dict[str, Row]:
        """Return all jobs of ours, by their ids, as they were at most so many seconds ago."""
        wanted_since = time.monotonic() - seconds
        with self._lock:  # several who wait have one answer
            if self._asked_at < max(wanted_since, self._changed_at):
                self._ask()
            if self._problem is not None:
                raise self._problem
            return self._rows

    def _ask(self) -> None:
        """Ask Slurm; that it does not answer, which takes it long to say, is an answer, too."""
        self._asked_at = time.monotonic()
        try:
            self._rows = {row.id: row for row in commands.jobs()}
            for row in self._rows.values():
                self._note(row)
            self._let_back()
            self._problem = None
        except EngineGone as exc:
            self._problem = exc

    def _note(self, row: Row) -> None:
        """Remember of a job what is not asked for again."""
        if row.id not in self._folders:
            self._folders[row.id] = row.run_dir
            self._left.update(left_jobs(row.run_dir))
        if row.left_seconds is None:
            self._ends.pop(row.id, None)
            return
        ends_at = boot_seconds() + row.left_seconds
        if abs(ends_at - self._ends.get(row.id, 0.0)) > STEADY_SECONDS:
            self._ends[row.id] = ends_at

    def _let_back(self) -> None:
        """Let jobs that wait go to nodes where one was left, when that has ended."""
        for job, own in list(self._avoiding.items()):
            row = self._rows.get(job)
            if own is None or row is None or row.state != PENDING:
                continue
            if not self._nodes_away(row.run_dir):
                with contextlib.suppress(EngineRefused):  # it has just begun
                    commands.run("scontrol", "update", f"jobid={job}", f"ExcNodeList={own}")
                self._avoiding[job] = None

    def _nodes_away(self, run_dir: Path) -> tuple[str, ...]:
        """Return the nodes where jobs were left that have not ended, as far as Slurm knows."""
        rows = [self._rows[job] for job in left_jobs(run_dir) if job in self._rows]
        return tuple(sorted({row.node for row in rows if row.state not in ENDED and row.node}))

    def _is_of_replica(self, row: Row) -> bool:
        """Whether a job is still its replica's: it goes on, or its folder says so."""
        if row.id in self._left:
            return False
        return row.state not in ENDED or read_job(row.run_dir) == row.id

    def _find(self, plan: ReplicaPlan, seconds: float) -> Instance | None:
        rows = self._look(seconds).values()
        own = [row for row in rows if row.labels == plan.labels and self._is_of_replica(row)]
        if own:
            first, *others = sorted(own, key=lambda row: (row.state in ENDED, int(row.id)))
            for each in others:
                if each.state not in ENDED:
                    self._kill(each.id)
            if first.state not in ENDED and read_job(first.run_dir) != first.id:
                with contextlib.suppress(OSError):  # an agent was killed before it had
                    write_job(first.run_dir, first.id)
            if first.state == PENDING and left_jobs(first.run_dir):
                self._avoiding.setdefault(first.id, plan.options.get("exclude", ""))
            found = self._instance(first, is_whole=True)
            if found.ends_at is None:
                return found
            return replace(found, replace_at=found.ends_at - _replaced_seconds(plan, first))
        return self._forgotten(plan)

    def _forgotten(self, plan: ReplicaPlan) -> Instance | None:
        """Return the job of a replica that Slurm does not know (any more).

        It may run all the same: a controller that was killed has lost what it had not saved.
        """
        run_dir = Path(plan.run_dir)
        job = read_job(run_dir)
        if job in (None, NO_JOB):
            return None
        self._folders[job] = run_dir
        report = read_report(run_dir, job)
        if report is None or self._is_over(report):
            self._lost.discard(job)
            facts = exit_facts(job, {}, report)
            return Instance(id=job, labels=plan.labels, state=InstanceState.EXITED, exit=facts)
        self._lost.add(job)
        return Instance(
            id=job,
            labels=plan.labels,
            state=InstanceState.RUNNING,
            pid=report.pid,
            address=report.address,
            waiting=f"Slurm has lost job {job}, which still runs on {report.node}",
        )

    def _is_over(self, report: JobReport) -> bool:
        """Whether a job that Slurm does not know has ended: by its own word, or for its silence."""
        return report.exit_code is not None or self._silent_seconds(report) >= LOST_SECONDS

    def _silent_seconds(self, report: JobReport) -> float:
        now = time.monotonic()
        beats, since = self._beats.get(report.job, (-1, now))
        if beats != report.beats:
            self._beats[report.job] = (report.beats, now)
            return 0.0
        return now - since

    def _instance(self, row: Row, *, is_whole: bool = False) -> Instance:
        """Return a job as the agent is to see it; `is_whole`: with its exit."""
        if row.state in ENDED:
            facts = self._exit(row) if is_whole else None
            return Instance(id=row.id, labels=row.labels, state=InstanceState.EXITED, exit=facts)
        report = read_report(row.run_dir, row.id)
        is_requeued = row.state == PENDING and report is not None and self._is_over(report)
        if report is None or is_requeued:
            return Instance(
                id=row.id,
                labels=row.labels,
                state=InstanceState.STARTING,
                waiting=_why_waiting(row) + (", requeued" if is_requeued else ""),
                is_on_its_way=_is_on_its_way(row),
                runs=0 if report is None else report.runs + 1,
            )
        is_silent = self._is_silent(row, report)
        return Instance(
            id=row.id,
            labels=row.labels,
            state=InstanceState.RUNNING,
            pid=report.pid,
            address=report.address,
            ends_at=self._ends.get(row.id),
            runs=report.runs,
            why_anew=f"Slurm has requeued job {row.id}" if report.runs else None,
            is_silent=is_silent,
            waiting=_why_silent(row, is_silent),
        )

    def _exit(self, row: Row) -> ExitFacts:
        """Return how a job has ended."""
        report, fields = read_report(row.run_dir, row.id), commands.job_fields(row.id)
        return exit_facts(row.id, fields, report, over_memory(row.run_dir, row.id))

    def _is_silent(self, row: Row, report: JobReport | None) -> bool:
        """Whether a job that should be running has not been heard of for long."""
        if report is None or row.state not in (RUNNING, COMPLETING):
            return False
        return self._silent_seconds(report) >= SILENT_SECONDS

    def _leave(self, row: Row) -> None:
        """Have a silent job killed, and count it as the replica's no more if it cannot be now."""
        self._kill(row.id)
        if not self._has_ended_within(row.id, LEAVE_SECONDS):
            with contextlib.suppress(OSError):  # the folder is gone
                leave_job(row.run_dir, row.id)
            self._left.add(row.id)

    def _dismiss(self, job: str) -> None:
        """Have a job end by itself if it runs: Slurm does not know it, or not that it runs."""
        folder = self._folder(job)
        report = None if folder is None else read_report(folder, job)
        if folder is None or report is None or self._is_over(report):
            return
        write_job(folder, NO_JOB)
        deadline = time.monotonic() + 2 * LOST_SECONDS
        while not self._is_over(report) and time.monotonic() < deadline:
            time.sleep(END_SECONDS)
            report = read_report(folder, job) or report

    def _kill(self, job: str) -> None:
        for arguments in (("--full", "--signal=KILL"), ()):  # now; and what waits, or starts
            try:
                commands.run("scancel", *arguments, job)
            except EngineRefused as exc:
                if not commands.is_not_there(exc):
                    raise

    def _has_ended(self, job: str, seconds: float) -> bool:
        if job in self._left:
            return True
        row = self._look(seconds).get(job)
        return job not in self._lost if row is None else row.state in ENDED

    def _has_ended_within(self, job: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._has_ended(job, END_SECONDS):
            if time.monotonic() >= deadline:
                return False
            time.sleep(END_SECONDS)
        return True

    def _folder(self, job: str) -> Path | None:
        if job not in self._folders:
            self._look(0.0)
        return self._folders.get(job)


def _sbatch(plan: ReplicaPlan, arguments: Sequence[str]) -> str:
    """Submit a job; return its id."""
    told = commands.run("sbatch", "--parsable", *arguments, stdin=job_script(plan))
    return told.strip().partition(";")[0]  # and its cluster's name


def _replaced_seconds(plan: ReplicaPlan, row: Row) -> float:
    """Return how long before its end a job's successor is asked for.

    As long for that to start as for sessions to end; but not as soon as a job begins: with a short
    time limit, each would be replaced at once, for ever.
    """
    before = 2 * warned_seconds(plan.options) + EARLY_SECONDS
    return min(before, LATEST_SHARE * (row.limit_seconds or 0.0))


def _why_silent(row: Row, is_silent: bool) -> str | None:
    """Say what is wrong with a job that should be running."""
    if row.state not in (RUNNING, COMPLETING):
        return f"Slurm: {row.state} ({row.reason})"
    text = f"job {row.id} on {row.node} has not been heard of for {SILENT_SECONDS:g} s or more"
    return text if is_silent else None


def _is_on_its_way(row: Row) -> bool:
    """Whether a job is being started, or Slurm has not looked yet whether it can be."""
    is_new = row.state == PENDING and row.reason in _NOT_CONSIDERED
    return is_new or row.state in (CONFIGURING, RUNNING)


def _why_waiting(row: Row) -> str:
    if row.state in _STARTED:
        return f"job {row.id} runs on {row.node}, and has not told its address yet"
    return f"Slurm: {row.state} ({row.reason}), job {row.id}"


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), READ_BYTES, offset)
    except FileNotFoundError:  # nothing was printed yet
        return b""
    except OSError as exc:
        raise EngineGone(f"{path} cannot be read: {exc.strerror}") from exc


def _check_nodes(plan: ReplicaPlan) -> None:
    """Refuse what no node has; and to serve without a token at addresses that others can reach.

    Raises:
        EngineGone, EngineRefused
    """
    found = commands.nodes(commands.COMMAND_SECONDS)
    most = max((node.gpus for node in found), default=0)
    check_gpus(plan.gpus, most, "look at what nodes have: sinfo -o '%N %G'")
    reached = (node.address for node in found if not is_loopback(node.address))
    check_token(plan, next(reached, None))
