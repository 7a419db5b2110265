# SPDX-License-Identifier: Apache-2.0
"""A worker's life between its start and its reaping.

    `starting.py` ──▶ _add ──▶ works (`tasks.py`)
    it runs a task ──stop_run──▶ SIGTERM ──grace──▶ kill
    it is idle ──leave_if_idle──▶ LEAVING ──┐
    its task is over, and it must go ───────┴─let_leave──▶ end of its pipe ──Timing.leave──▶ kill
    it must exit at once ──kill──▶ SIGKILL to its whole tree

    sentinel readable ──▶ EXITED, and the source is asked for its status ──▶ Exited ──┐
    end of its pipe ──▶ asked too, where there is no sentinel                         ├──▶ _reap
    `Timing.exit_status` without an answer, or its source is lost ────────────────────┘

Reaping reads what is left in the pipe, kills what the worker left behind, takes it out of the pool,
makes its task's event, and closes its descriptors, in this order: what it had already sent counts,
and nothing of it is left when its task's event is delivered.

The stage changes under the pools' lock, which `stop_run` finds taken (it is called on any thread)
and the others take; those are the supervisor thread's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from functools import partial

from ..errors import FrameError
from ..policy.memory import Timing
from ..spawning.source import Exited, SourceFactory, signal_group
from .channels import Channels, WakeUp
from .memory import WorkerMemory, kill_leftovers, kill_tree
from .pool import PooledWorker, Pools, Run, Stage, StopReason
from .starting import WorkerStarter
from .tasks import Tasks

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Lifecycle:
    """Starts, stops and reaps workers."""

    _pools: Pools
    _wake_up: WakeUp
    _selector: selectors.BaseSelector
    _make_source: SourceFactory
    _channels: Channels
    _memory: WorkerMemory
    _tasks: Tasks
    _timing: Timing
    _grace_seconds: float
    starter: WorkerStarter = field(init=False)

    def __post_init__(self) -> None:
        pools, wake_up, tasks, timing = self._pools, self._wake_up, self._tasks, self._timing
        self.starter = WorkerStarter(
            pools, wake_up, self._selector, self._make_source, tasks, timing, self._on_source
        )

    def _on_source(self) -> None:
        news = self.starter.read()
        if news is None:
            self._release_workers()
            return
        for each in news:
            if isinstance(each, PooledWorker):
                self._add(each)
            else:
                self._on_status(each)

    def _on_pipe(self, worker: PooledWorker) -> None:
        had_ended = worker.pipe_ended
        if had_ended:  # earlier in this round
            return
        if worker.unsent:
            self._channels.write_rest(worker)
        self._read(worker)
        if worker.pipe_ended and worker.stage is not Stage.EXITED:
            # It has exited, which the sentinel tells, or it has closed its pipe and lives.
            if worker.sentinel is None:
                self.starter.request_status(worker.pid)
            if worker.stage is not Stage.KILLED:
                worker.deadline = min(worker.deadline, time.monotonic() + self._timing.leave)
                self._wake_up.wake_by(worker.deadline)

    def _on_exit(self, worker: PooledWorker) -> None:
        if self._channels.end_sentinel(worker):  # else it was reaped earlier in this round
            self._mark_exited(worker)
            if worker.source_number != self._pools.source_number:
                self._reap(worker)  # its zygote is gone: nothing will report its exit status
                return
            self._wake_up.wake_by(worker.deadline)
            self.starter.request_status(worker.pid)

    def _on_status(self, exited: Exited) -> None:
        """Reap the worker of the present source whose exit status is known now."""
        for worker in self._pools.workers():
            if (worker.pid, worker.source_number) == (exited.pid, self._pools.source_number):
                worker.exited = exited
                self._reap(worker)
                return

    def _read(self, worker: PooledWorker) -> bool:
        """Act on the frames that have arrived; False when there is nothing (more) to read."""
        try:
            if (frames := self._channels.read(worker)) is None:
                return False
            for frame in frames:
                if self._tasks.on_frame(worker, frame):
                    if frame["retire"]:  # what it has left behind would keep it from exiting
                        self.kill(worker)
                    else:
                        self._let_leave(worker)
        except (FrameError, KeyError, TypeError):
            log.exception(
                "invalid frame from worker %s (pid %d); closing its pipe",
                worker.name,
                worker.pid,
                extra=worker.log_fields,
            )
            self._channels.end_pipe(worker)
            return False
        return True

    def _add(self, worker: PooledWorker) -> None:
        """Give a worker that has started something to do."""
        self._memory.join(worker)
        self._channels.connect(
            worker, partial(self._on_pipe, worker), partial(self._on_exit, worker)
        )
        with self._pools.lock:
            pool = self._pools.of(worker)
            pool.add(worker)
            if not self._pools.is_stopping:
                self._tasks.employ(pool, worker)
                return
            pool.enter(worker, Stage.LEAVING)
        self._let_leave(worker)

    def _release_workers(self) -> None:
        """Let the workers of a lost source finish what they do, and leave."""
        for worker in self._pools.workers():
            if worker.stage is Stage.EXITED:
                self._reap(worker)
            else:
                self._leave_if_idle(worker)

    def stop_run(self, run: Run, reason: StopReason, grace_seconds: float) -> None:
        """Tell a running task to stop; it is killed after the grace. Any thread, under the lock."""
        worker = run.worker
        if worker is None or run.stop_reason is not None:
            return
        run.stop_reason = reason
        if worker.stage is not Stage.RUNNING:  # it exits already
            return
        deadline = time.monotonic() + grace_seconds
        self._pools.of(worker).enter(worker, Stage.STOPPING, deadline=deadline)
        signal_group(worker.pid, worker.sentinel, signal.SIGTERM)
        self._wake_up.wake_by(deadline)

    def act_on_deadlines(self, now: float) -> None:
        """Act on what should have happened by now."""
        for worker in self._pools.workers():
            if worker.deadline <= now:
                self._on_deadline(worker)
        if (violator := self._memory.look_when_due(now)) is not None:
            self.kill(violator)
        if self.starter.give_up_if_silent(now):
            self._release_workers()

    def next_deadline(self, now: float) -> float:
        """Return when to act again."""
        deadlines = (worker.deadline for worker in self._pools.workers())
        return min(self.starter.deadline(now), self._memory.deadline(), *deadlines)

    def stop_all(self, now: float, deadline: float) -> None:
        """Tell every task to stop by the deadline, and every worker without one to leave."""
        grace_seconds = max(0.0, deadline - now)
        for worker in self._pools.workers():
            self._leave_if_idle(worker)
            with self._pools.lock:
                if worker.run is not None:
                    self.stop_run(worker.run, StopReason.SHUT_DOWN, grace_seconds)

    def kill_all(self) -> None:
        """Kill every worker that still lives."""
        for worker in self._pools.workers():
            if worker.stage not in (Stage.KILLED, Stage.EXITED):
                self.kill(worker)

    def kill(self, worker: PooledWorker) -> None:
        """Send SIGKILL to the whole tree; the exit is noticed as any other."""
        with self._pools.lock:
            self._pools.of(worker).enter(worker, Stage.KILLED)
        kill_tree(worker)

    def _on_deadline(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            stage = worker.stage
            worker.deadline = math.inf
            if stage is Stage.RUNNING and worker.run is not None and not worker.pipe_ended:
                self.stop_run(worker.run, StopReason.TIMED_OUT, self._grace_seconds)
                return
        if stage is Stage.IDLE and not worker.pipe_ended:
            self._leave_if_idle(worker)
        elif stage is Stage.EXITED:
            self._reap(worker)
        elif stage is not Stage.KILLED:
            self.kill(worker)

    def _leave_if_idle(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            if worker.stage is not Stage.IDLE:  # also when a task was submitted just now
                return
            self._pools.of(worker).enter(worker, Stage.LEAVING)
        self._let_leave(worker)

    def _let_leave(self, worker: PooledWorker) -> None:
        """Have a worker without a task exit: it does so at the end of its pipe."""
        with contextlib.suppress(OSError):
            worker.pipe.shutdown(socket.SHUT_WR)
        worker.deadline = time.monotonic() + self._timing.leave
        self._wake_up.wake_by(worker.deadline)

    def _mark_exited(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            if worker.stage is not Stage.EXITED:
                worker.exited_idle = worker.stage is Stage.IDLE
                deadline = time.monotonic() + self._timing.exit_status
                self._pools.of(worker).enter(worker, Stage.EXITED, deadline=deadline)

    def _reap(self, worker: PooledWorker) -> None:
        """Leave nothing of a worker that has exited, and end its task."""
        self._mark_exited(worker)
        while not worker.pipe_ended and self._read(worker):
            pass
        if left := kill_leftovers(worker):
            log.info(
                "worker %s left processes %s; killed", worker.name, left, extra=worker.log_fields
            )
        self._tasks.end_with_worker(worker)
        if worker.exited_idle and worker.tasks_run == 0:
            self.starter.count_failure(f"worker {worker.name} exited before its first task")
        self._channels.disconnect(worker)
