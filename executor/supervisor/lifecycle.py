# SPDX-License-Identifier: Apache-2.0
"""A worker's life: its start by the source in use, as a rule a zygote, its stop and its reaping.

    request_workers ──▶ source ──▶ Forked ──▶ _add ──▶ works (`tasks.py`)
                          │
                          ├ Refused, or its end ──▶ again after a back-off; after some failures
                          │                         without preloading; in the end waiting tasks
                          │                         fail
                          ├ Unsafe ──▶ from then on workers are spawned
                          └ silence ──▶ as its end

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

The stage changes under the pools' lock. `stop_run` is called with the lock held, on any thread; the
other functions take the lock, on the supervisor's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...system.memory.usage import anonymous_bytes
from ...system.process.exit_reason import ExitKind
from ...system.process.process_identity import ProcessIdentity
from ...system.text.json_lines import Json
from ..errors import FrameError
from ..policy.memory import Timing
from ..policy.plan import FAILED_STARTS_BEFORE_BARE, MAX_FAILED_STARTS, back_off_seconds
from ..spawning import source as spawning
from .channels import Channels, Handler, WakeUp
from .memory import WorkerMemory, kill_leftovers, kill_tree
from .pool import PooledWorker, Pools, Run, Stage, StopReason
from .tasks import Tasks

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class WorkerStarter:
    """Owns the source of workers, and the back-off between its restarts."""

    _pools: Pools
    _wake_up: WakeUp
    _selector: selectors.BaseSelector
    _make_source: spawning.SourceFactory
    _tasks: Tasks
    _timing: Timing
    _source: spawning.WorkerSource | None = None
    _may_fork: bool = True
    _next_start: float = 0.0
    _answer_by: float = math.inf  # finite while the source owes an answer
    on_readable: Handler | None = None

    @property
    def zygote_pid(self) -> int | None:
        """The zygote's pid; None when there is none at the moment. Any thread."""
        source = self._source
        return None if source is None else source.pid

    def start(self) -> None:
        """Start a source; an `OSError` where the zygote's program cannot be started at all."""
        self._pools.source_number += 1
        may_preload = self._pools.failed_starts < FAILED_STARTS_BEFORE_BARE
        self._source = self._make_source(may_preload, self._may_fork)
        self._selector.register(self._source.fileno(), selectors.EVENT_READ, self.on_readable)

    def request_workers(self) -> None:
        """Request the workers that are wanted, unless a failure is too recent."""
        if self._pools.is_stopping or time.monotonic() < self._next_start:
            return
        if self._source is None:
            try:
                self.start()
            except OSError as exc:
                self.count_failure(f"the zygote cannot be started: {exc}")
        if self._source is None:
            return
        for pool in self._pools.by_schedule.values():
            with self._pools.lock:
                ordinals = []
                for _ in range(pool.wanted()):
                    # The smallest that is free, so that guaranteed workers keep their names.
                    taken = pool.workers.keys() | pool.requested
                    ordinals.append(next(i for i in itertools.count(1) if i not in taken))
                    pool.requested.add(ordinals[-1])
            for ordinal in ordinals:
                self._source.request(f"{pool.schedule.lower()}-{ordinal}")
        self._expect_answer()

    def fork(self, entry: str, payload: Json, fds: Sequence[int]) -> bool:
        """Fork a process that is no worker; False when that is not possible now. Any thread."""
        source = self._source
        silence = self._timing.source_silence
        return source is not None and source.fork(entry, payload, fds, silence)

    def request_status(self, pid: int) -> None:
        """Have the source reap a worker that has exited; a zygote does so by itself."""
        if self._source is not None:
            self._source.noticed_exit(pid)

    def read(self) -> list[PooledWorker | spawning.Exited] | None:
        """Return workers that have started, and exits; None when the source is lost."""
        if self._source is None:
            return []
        events = self._source.read()
        if events is None:
            self._lose("the zygote exited", self._timing.source_exit)
            return None
        news: list[PooledWorker | spawning.Exited] = []
        for event in events:
            match event:
                case spawning.Forked():
                    news.append(self._new_worker(event))
                case spawning.Exited():
                    news.append(event)
                case spawning.Refused():
                    pool, ordinal = self._pools.named(event.name)
                    pool.requested.discard(ordinal)
                    self.count_failure(f"no process for worker {event.name}: {event.error}")
                case spawning.Unsafe():
                    log.warning("the zygote has %d threads, and must not fork", event.threads)
                    self._may_fork = False
        self._answer_by = math.inf
        self._expect_answer()
        return news

    def give_up_if_silent(self, now: float) -> bool:
        """Replace a source that owes an answer for too long; return whether it was replaced."""
        if now < self._answer_by:
            return False
        self._lose(f"the zygote has not answered for {self._timing.source_silence:.0f} s", 0.0)
        return True

    def deadline(self, now: float) -> float:
        """Return when to act on silence, or to request workers again."""
        next_start = self._next_start if self._next_start > now else math.inf
        return min(next_start, self._answer_by)

    def count_failure(self, why: str) -> None:
        """Back off, since a source, or a worker before its first task, has failed."""
        failures = self._pools.failed_starts = self._pools.failed_starts + 1
        self._next_start = time.monotonic() + back_off_seconds(failures)
        self._wake_up.wake_by(self._next_start)
        if failures >= MAX_FAILED_STARTS:
            log.error("no worker can be started: %s", why)
            self._tasks.refuse_waiting(ExitKind.LOST, why)

    def close(self, grace_seconds: float) -> None:
        """End the source; its workers continue."""
        self._answer_by = math.inf
        if self._source is not None:
            self._selector.unregister(self._source.fileno())
            self._source.close(grace_seconds)
            self._source = None

    def _expect_answer(self) -> None:
        """Set the time by which the source has to answer, if workers are requested."""
        requested = any(pool.requested for pool in self._pools.by_schedule.values())
        if self._answer_by == math.inf and requested:
            self._answer_by = time.monotonic() + self._timing.source_silence
            self._wake_up.wake_by(self._answer_by)

    def _lose(self, why: str, grace_seconds: float) -> None:
        self.close(grace_seconds)
        for pool in self._pools.by_schedule.values():
            pool.requested.clear()
        if not self._pools.is_stopping:
            self.count_failure(why)
            log.warning("%s; starting another", why)
        self._pools.source_number += 1

    def _new_worker(self, forked: spawning.Forked) -> PooledWorker:
        pool, ordinal = self._pools.named(forked.name)
        pool.requested.discard(ordinal)
        return PooledWorker(
            name=forked.name,
            pool=pool,
            ordinal=ordinal,
            guaranteed=ordinal <= pool.guaranteed,
            pid=forked.pid,
            started_at=_started_at(forked.pid),
            pipe=forked.pipe,
            sentinel=forked.sentinel,
            source_number=self._pools.source_number,
            inherited_bytes=anonymous_bytes(forked.pid),
        )


def _started_at(pid: int) -> float:
    """With the pid, the identity of a process; 0 when it is gone already."""
    try:
        return ProcessIdentity.of(pid).started_at
    except ProcessLookupError:
        return 0.0


@dataclass(eq=False, slots=True)
class Lifecycle:
    """Starts, stops and reaps workers."""

    starter: WorkerStarter
    _pools: Pools
    _wake_up: WakeUp
    _channels: Channels
    _memory: WorkerMemory
    _tasks: Tasks
    _timing: Timing
    _grace_seconds: float

    def on_source(self) -> None:
        """Act on what the source of workers reports."""
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

    def _on_status(self, exited: spawning.Exited) -> None:
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
            text = "invalid frame from worker %s (pid %d); closing its pipe"
            log.exception(text, worker.name, worker.pid, extra=worker.log_fields)
            self._channels.end_pipe(worker)
            return False
        return True

    def _add(self, worker: PooledWorker) -> None:
        """Take in a worker that has started: assign it a task, or keep it idle."""
        self._memory.join(worker)
        self._channels.connect(
            worker, partial(self._on_pipe, worker), partial(self._on_exit, worker)
        )
        with self._pools.lock:
            worker.pool.add(worker)
            if not self._pools.is_stopping:
                self._tasks.employ(worker)
                return
            worker.pool.enter(worker, Stage.LEAVING)
        self._let_leave(worker)

    def _release_workers(self) -> None:
        """Retire the workers of a lost source; each finishes its task first."""
        for worker in self._pools.workers():
            if worker.stage is Stage.EXITED:
                self._reap(worker)
            else:
                self._leave_if_idle(worker)

    def stop_run(self, run: Run, reason: StopReason, grace_seconds: float) -> None:
        """Ask a running task to stop, and kill it after the grace. Any thread, under the lock."""
        worker = run.worker
        if worker is None or run.stop_reason is not None:
            return
        run.stop_reason = reason
        if worker.stage is not Stage.RUNNING:  # it exits already
            return
        deadline = time.monotonic() + grace_seconds
        worker.pool.enter(worker, Stage.STOPPING, deadline=deadline)
        spawning.signal_group(worker.pid, worker.sentinel, signal.SIGTERM)
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
        """Ask every task to stop by the deadline, and every worker without one to leave."""
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
            worker.pool.enter(worker, Stage.KILLED)
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
            worker.pool.enter(worker, Stage.LEAVING)
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
                worker.pool.enter(worker, Stage.EXITED, deadline=deadline)

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
