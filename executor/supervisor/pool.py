# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping: which workers are idle, which run what, which tasks wait.

Everything here is used under `Pools.lock`, and has no effect beyond a frame in a pipe. The stages
of a worker:

    IDLE ──task──▶ RUNNING ──cancel, time-out, stop──▶ STOPPING ──grace over──▶ KILLED
     ▲  │             │                                   │                       │
     │  └─ idle out ──┼────▶ LEAVING ◀── must retire ─────┘                       ▼
     └── outcome ─────┘         └───────────── its exit, from any stage ──────▶ EXITED

A stage has at most one deadline; what happens at it stands in `lifecycle.py`.
"""

from __future__ import annotations

import enum
import heapq
import math
import socket
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..messages import LONG, SHORT, FrameReader, Task, WorkerStatus, encode_frame
from ..policy.plan import KEPT_WORKERS, Plan, workers_wanted

if TYPE_CHECKING:
    from ...system.memory.cgroups import Cgroup
    from ..policy.memory import Usage
    from ..spawning.source import Exited


class Stage(enum.Enum):
    """A worker's stage; its deadline, where it has one, is in brackets."""

    IDLE = enum.auto()  # [burst: leaves]
    RUNNING = enum.auto()  # [the task's time-out: asked to stop]
    STOPPING = enum.auto()  # asked to stop [killed]
    LEAVING = enum.auto()  # asked to exit, and given no task [killed]
    KILLED = enum.auto()  # SIGKILL was sent to its tree
    EXITED = enum.auto()  # waits for its exit status [reaped without]


class StopReason(enum.Enum):
    """The reason why a running task was asked to stop."""

    CANCELLED = enum.auto()
    TIMED_OUT = enum.auto()
    SHUT_DOWN = enum.auto()


@dataclass(eq=False, slots=True)
class Run:
    """One task: waiting for a worker, or running in one."""

    task: Task
    frame: bytes
    worker: PooledWorker | None = None
    started: float = 0.0  # monotonic
    stop_reason: StopReason | None = None
    machine_oom_kills: int | None = None  # of the whole machine, when it was assigned


@dataclass(eq=False, slots=True)
class PooledWorker:
    """The daemon's record of a worker."""

    name: str
    pool: Pool
    ordinal: int
    guaranteed: bool
    pid: int
    started_at: float  # with the pid, its identity
    pipe: socket.socket
    sentinel: int | None
    source_number: int  # which zygote forked it
    inherited_bytes: int = 0  # anonymous memory that it shares with the zygote
    cgroup: Cgroup | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    stage: Stage = Stage.IDLE
    deadline: float = math.inf  # monotonic
    run: Run | None = None
    tasks_run: int = 0
    first_rss_bytes: int | None = None
    grown_bytes: int | None = None  # since its first task
    pipe_ended: bool = False
    sentinel_watched: bool = True
    exited_idle: bool = False  # by itself, with nothing to do
    limit_violation: Usage | None = None  # for which the watchdog killed it
    exited: Exited | None = None

    def send(self, frame: bytes = b"") -> bool:
        """Write what is unsent and the frame, without waiting; True when everything is written."""
        self.unsent += frame
        try:
            sent = self.pipe.send(self.unsent)
            del self.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the worker exits, which is noticed elsewhere
            self.unsent.clear()
        return not self.unsent

    @property
    def is_kept(self) -> bool:
        """Return whether the worker stays when there is nothing to do, as a fresh one does.

        One that has worked has pages of its own; after a while it exits, and another is forked in
        2 ms.
        """
        return self.guaranteed and self.ordinal <= KEPT_WORKERS and not self.tasks_run

    @property
    def log_fields(self) -> dict[str, Any]:
        """Structured fields of a log record about the worker."""
        task_id = None if self.run is None else self.run.task.id
        return {"worker": self.name, "pid": self.pid, "request_id": task_id}

    def status(self, plan: Plan) -> WorkerStatus:
        """Describe the worker for people, without its memory, which has to be read."""
        task = None if self.run is None else self.run.task
        return WorkerStatus(
            name=self.name,
            schedule=self.pool.schedule,
            pid=self.pid,
            guaranteed=self.guaranteed,
            task_id=None if task is None else task.id,
            label="" if task is None else task.label,
            cap_bytes=(task and task.memory_bytes) or plan.worker_bytes,
            tasks_run=self.tasks_run,
        )


class Pool:
    """The workers of one schedule, and the tasks that wait for one of them."""

    def __init__(self, schedule: str, plan: Plan) -> None:
        self.schedule = schedule
        self.share_bytes = plan.share_bytes(schedule)  # set aside for each guaranteed worker
        self.guaranteed = plan.guaranteed(schedule)
        self.capacity = plan.capacity(schedule)
        self.workers: dict[int, PooledWorker] = {}  # by ordinal
        self.requested: set[int] = set()  # ordinals; the supervisor thread's alone
        self.waiting: deque[Run] = deque()
        self._idle: list[int] = []  # heap of ordinals; may name workers that are idle no more
        self._stages: Counter[Stage] = Counter()  # of its workers
        self._busy_count = 0
        self.has_worked = False
        self.runs = 0  # waiting or running
        self.expected_bytes = 0  # of all of them

    def room(self) -> int:
        """Return how many tasks may still be submitted."""
        return max(0, self.capacity - self._busy_count - len(self.waiting))

    def beyond_shares_bytes(self) -> int:
        """Return what the tasks are expected to need beyond guaranteed workers' shares."""
        shares = min(self.runs, self.guaranteed) * self.share_bytes
        return max(0, self.expected_bytes - shares)

    def wanted(self) -> int:
        """Return how many workers to request now."""
        idle = self._stages[Stage.IDLE]
        living = idle + self._stages[Stage.RUNNING]
        return workers_wanted(
            schedule=self.schedule,
            kept=min(self.guaranteed, KEPT_WORKERS) if self.has_worked else 0,
            capacity=self.capacity,
            living=living,
            leaving=len(self.workers) - living,
            idle=idle,
            waiting=len(self.waiting),
            requested=len(self.requested),
        )

    def enter(self, worker: PooledWorker, stage: Stage, *, deadline: float = math.inf) -> None:
        """Move a worker to a stage: stages and counts change together."""
        self._stages[worker.stage] -= 1
        self._stages[stage] += 1
        worker.stage, worker.deadline = stage, deadline
        if stage is Stage.IDLE:
            heapq.heappush(self._idle, worker.ordinal)

    def add(self, worker: PooledWorker) -> None:
        """Add a worker that has started; it is idle."""
        self.workers[worker.ordinal] = worker
        self._stages[worker.stage] += 1
        heapq.heappush(self._idle, worker.ordinal)

    def remove(self, worker: PooledWorker) -> None:
        """Remove a worker that is reaped."""
        self._stages[worker.stage] -= 1
        del self.workers[worker.ordinal]

    def idle_worker(self) -> PooledWorker | None:
        """Return the idle worker of the smallest ordinal, so that burst workers idle out."""
        while self._idle:
            worker = self.workers.get(heapq.heappop(self._idle))
            if worker is not None and worker.stage is Stage.IDLE:
                return worker
        return None

    def assign(self, worker: PooledWorker, run: Run, now: float) -> bool:
        """Give the task to the worker; False when some of the frame has to wait."""
        timeout = run.task.timeout_seconds
        deadline = math.inf if timeout is None else now + timeout
        worker.run, run.worker, run.started = run, worker, now
        self._busy_count += 1
        self.enter(worker, Stage.RUNNING, deadline=deadline)
        return worker.send(run.frame)

    def unassign(self, worker: PooledWorker) -> None:
        """Take the task that is over from the worker."""
        if (run := worker.run) is not None:
            worker.run = run.worker = None
            self._busy_count -= 1


class Pools:
    """Both pools, the tasks in them, and the lock over all of it."""

    def __init__(self, plan: Plan) -> None:
        self.lock = threading.Lock()
        self.by_schedule = {schedule: Pool(schedule, plan) for schedule in (LONG, SHORT)}
        self.runs: dict[str, Run] = {}
        # Which worker source is in use; none, right after one was lost. Workers of another one
        # finish their task and leave.
        self.source_number = 0
        self.failed_starts = 0  # of sources and fresh workers, in a row
        self.is_stopping = False

    def add_run(self, run: Run) -> None:
        """Count a task as under way."""
        pool = self.by_schedule[run.task.schedule]
        pool.has_worked = True
        pool.runs += 1
        pool.expected_bytes += run.task.expected_bytes
        self.runs[run.task.id] = run

    def remove_run(self, run: Run) -> None:
        """Count a task as over."""
        if self.runs.pop(run.task.id, None) is not None:
            pool = self.by_schedule[run.task.schedule]
            pool.runs -= 1
            pool.expected_bytes -= run.task.expected_bytes

    def named(self, worker_name: str) -> tuple[Pool, int]:
        """Return the pool and the ordinal of a worker such as `long-3`."""
        schedule, _, ordinal = worker_name.rpartition("-")
        return self.by_schedule[schedule.upper()], int(ordinal)

    def workers(self) -> list[PooledWorker]:
        """Return the workers of both pools."""
        return [worker for pool in self.by_schedule.values() for worker in pool.workers.values()]


def task_frame(task: Task) -> bytes:
    """Encode the task as a worker reads it."""
    return encode_frame(
        {
            "task": task.id,
            "operation": task.operation,
            "payload": task.payload,
            "log_path": task.log_path,
            "label": task.label,
            **({} if task.traceparent is None else {"traceparent": task.traceparent}),
        }
    )
