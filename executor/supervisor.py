# SPDX-License-Identifier: Apache-2.0
"""The one thread that waits on pipes, sentinels, the worker source and an alarm, and acts on them.

The data flow and the failure cases stand in `executor.py`. A round of the loop: wait, let each
thing that is ready speak, act on deadlines that have passed, ask for workers that are wanted, tell
the events. No round blocks, and nothing is polled: a deadline is what ends a wait early.

    alarm.py         what ends the wait
    births.py        where workers come from, and what is made of its failures
    memory_watch.py  what is looked at while workers have tasks

It does *not* decide (`decisions.py`), count (`pool.py`) or explain (`deaths.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from ..processes.memory import anonymous_bytes
from . import deaths, trees
from .alarm import Alarm
from .births import Births, ordinal_of
from .decisions import BURST_IDLE_SECONDS, reason_to_recycle
from .errors import FrameError
from .memory_watch import MemoryWatch
from .messages import LONG, SHORT, Died, EventSink, ExecutorEvent, Progressed, RoomFreed, Started
from .plan import Plan
from .pool import Pool, PooledWorker, Pools, Run, Stage, StopReason
from .sources import Exited, Forked, SourceFactory, signal_group
from .task_log import scratch_path, settle
from .worker_cgroups import WorkerCgroups

log = logging.getLogger(__name__)

_READ_BYTES = 262_144
_LEAVE_SECONDS = 1.0  # a worker that has nothing to do and is told to go
_STATUS_SECONDS = 1.0  # between a worker's death and the zygote's word of how


class Supervisor:
    """Owns the workers' processes; runs on a thread of its own."""

    def __init__(
        self,
        pools: Pools,
        *,
        make_source: SourceFactory,
        cgroups: WorkerCgroups,
        plan: Plan,
        on_event: EventSink,
        grace_seconds: float,
        log_tail_lines: int,
    ) -> None:
        self._pools = pools
        self._cgroups = cgroups
        self._on_event = on_event
        self._grace_seconds = grace_seconds
        self._log_tail_lines = log_tail_lines

        self._selector = selectors.DefaultSelector()
        self._alarm = Alarm()
        self._notices: deque[ExecutorEvent] = deque()  # from other threads
        self._clogged: deque[PooledWorker] = deque()  # their frame did not fit into the pipe
        self._events: list[ExecutorEvent] = []
        self._freed: set[str] = set()

        self._births = Births(pools, self._alarm, self._selector, make_source, self)
        self._memory = MemoryWatch(pools, self._alarm, cgroups, plan)
        self._stop_deadline = math.inf  # finite once we are asked to stop
        self._thread = threading.Thread(target=self._run, name="executor-supervisor", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the source and the thread.

        Raises:
            OSError: the zygote's program cannot be started at all.
        """
        self._selector.register(self._alarm, selectors.EVENT_READ, self._alarm.hear)
        self._births.start()
        self._thread.start()

    def notify(self, event: ExecutorEvent) -> None:
        """Have the event told, before anything that the worker says later."""
        self._notices.append(event)

    def ring(self) -> None:
        """Wake the thread up; once is enough until it has woken."""
        self._alarm.ring()

    def unclog(self, worker: PooledWorker) -> None:
        """Write the rest of a frame when the pipe has room."""
        self._clogged.append(worker)
        self.ring()

    def stop_run(self, run: Run, reason: StopReason, grace_seconds: float) -> None:
        """Tell a running task to stop; it is killed after the grace. Call it under the lock."""
        worker = run.worker
        if worker is None or run.stop_reason is not None:
            return
        run.stop_reason = reason
        if worker.stage is not Stage.RUNNING:  # it is dying already
            return
        self._pools.of(worker).enter(
            worker, Stage.STOPPING, deadline=time.monotonic() + grace_seconds
        )
        self._signal(worker, signal.SIGTERM)
        self._alarm.set(worker.deadline)

    def stop(self, grace_seconds: float) -> None:
        """End everything; returns when it is gone."""
        self._stop_deadline = time.monotonic() + grace_seconds
        self.ring()
        self._thread.join()
        self._selector.close()
        self._alarm.close()

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while not self._is_done():
                for speak in self._wait():
                    speak()
                self._take_notices()
                self._act_on_deadlines()
                self._births.ask_for_workers()
                self._tell()
        finally:
            self._close()

    def _wait(self) -> list[Callable[[], None]]:
        ready = self._selector.select(self._alarm.seconds_left(time.monotonic()))
        # Notices first: a task's `Started` was noted before its frame was sent.
        self._take_notices()
        return [key.data for key, _ in ready]

    def _take_notices(self) -> None:
        while self._notices:
            self._events.append(self._notices.popleft())
        while self._clogged:
            worker = self._clogged.popleft()
            if not worker.pipe_ended:
                self._watch_pipe(worker, writing=True)

    def _tell(self) -> None:
        events, self._events = self._events, []
        events.extend(RoomFreed(schedule) for schedule in self._freed)
        self._freed.clear()
        for event in events:
            try:
                self._on_event(event)
            except Exception:
                log.exception("the executor's listener failed on %s", type(event).__name__)

    # ------------------------------------------------------------------ what workers say

    def _on_pipe(self, worker: PooledWorker) -> None:
        if self._has_ended(worker):
            return
        if worker.unsent:
            self._go_on_writing(worker)
        self._read_pipe(worker)
        if self._has_ended(worker) and worker.stage is not Stage.DEAD:
            self._on_pipe_end(worker)

    @staticmethod
    def _has_ended(worker: PooledWorker) -> bool:
        return worker.pipe_ended

    def _go_on_writing(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            done = worker.send_rest()
        if done:
            self._watch_pipe(worker, writing=False)

    def _read_pipe(self, worker: PooledWorker) -> bool:
        """Hear what has arrived; False when there is nothing (more) to hear."""
        try:
            data = worker.pipe.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._forget_pipe(worker)
            return False
        try:
            for frame in worker.reader.feed(data):
                self._on_frame(worker, frame)
        except (FrameError, KeyError, TypeError):
            log.exception("worker %s (pid %d) speaks in tongues", worker.name, worker.pid)
            self._forget_pipe(worker)
        return not worker.pipe_ended

    def _on_frame(self, worker: PooledWorker, frame: deaths.Frame) -> None:
        run = worker.run
        if run is None or frame["task"] != run.task.id:
            return  # a thread that an operation left reports on a task that is over
        if frame["kind"] == "progress":
            self._events.append(Progressed(run.task.id, frame["data"], time.time()))
            return
        self._conclude(worker, run, frame)

    def _conclude(self, worker: PooledWorker, run: Run, frame: deaths.Frame) -> None:
        """The task is over and its worker lives: keep the worker, or let it go."""
        cgroup = self._cgroups.reading(worker, always=frame["kind"] == "raised")
        event = deaths.conclusion(worker, run, frame, cgroup, self._log_tail_lines)
        self._events.append(event)
        self._freed.add(worker.schedule)
        self._births.count_success()
        worker.tasks_run += 1
        worker.rss_bytes = frame["rss_bytes"]
        if worker.first_rss_bytes is None:
            worker.first_rss_bytes = worker.rss_bytes
        if run.task.memory_bytes is not None:
            self._cgroups.apply_limit(worker, None)
        why_leave = frame["retire"] or self._why_leave(worker, event)
        with self._pools.lock:
            pool = self._pools.of(worker)
            pool.unassign(worker)
            self._pools.forget(run)
            if worker.stage in (Stage.KILLED, Stage.DEAD):
                return
            # A signal of ours may still be on its way to it, so it is never used again.
            if not (why_leave or run.stop_reason):
                self._employ(pool, worker)
                return
            pool.enter(worker, Stage.LEAVING)
        log.info("worker %s leaves: %s", worker.name, why_leave or "it was told to stop")
        self._see_off(worker, kill=bool(frame["retire"]))

    def _why_leave(self, worker: PooledWorker, event: ExecutorEvent) -> str | None:
        if self.is_stopping:
            return "the executor stops"
        if isinstance(event, Died):  # what a `MemoryError` left half done is not to be trusted
            return "its task ran out of memory"
        if worker.source_number != self._births.source_number:
            return "its zygote is gone"
        return reason_to_recycle(grown_bytes=worker.grown_bytes)

    def _employ(self, pool: Pool, worker: PooledWorker) -> None:
        """Give a free worker the next waiting task, or let it idle. Under the lock."""
        now = time.monotonic()
        if pool.waiting:
            self._assign(pool, worker, pool.waiting.popleft(), now)
            return
        idles_out = math.inf if worker.kept else now + BURST_IDLE_SECONDS
        pool.enter(worker, Stage.IDLE, deadline=idles_out)
        self._alarm.set(idles_out)

    def _assign(self, pool: Pool, worker: PooledWorker, run: Run, now: float) -> None:
        self._events.append(self.started(worker, run))
        if not self.assign(pool, worker, run, now):
            self._clogged.append(worker)

    def assign(self, pool: Pool, worker: PooledWorker, run: Run, now: float) -> bool:
        """Hand the task over; False when the frame has to be finished later. Under the lock."""
        if run.task.memory_bytes is not None:
            self._cgroups.apply_limit(worker, run.task.memory_bytes)
        if worker.cgroup is None and run.task.schedule == LONG:
            # Too dear for SHORT tasks; where there are cgroups they tell better.
            run.machine_oom_kills = deaths.machine_oom_kills()
        self._memory.note_busy(worker, now)
        complete = pool.assign(worker, run, now)
        self._alarm.set(worker.deadline)
        return complete

    @staticmethod
    def started(worker: PooledWorker, run: Run) -> Started:
        """The event that the worker takes the task."""
        return Started(run.task.id, worker.name, worker.pid, worker.started_at, time.time())

    # ------------------------------------------------------------------ how workers end

    def _see_off(self, worker: PooledWorker, *, kill: bool) -> None:
        """Let a worker without a task go: it ends at the end of its pipe, or is killed."""
        if kill:
            self._kill(worker)
            return
        with contextlib.suppress(OSError):
            worker.pipe.shutdown(1)  # SHUT_WR: the worker reads the end
        worker.deadline = time.monotonic() + _LEAVE_SECONDS
        self._alarm.set(worker.deadline)

    def _kill(self, worker: PooledWorker) -> None:
        """SIGKILL to the whole tree; its death is heard of as any other."""
        with self._pools.lock:
            self._pools.of(worker).enter(worker, Stage.KILLED)
        trees.kill_tree(worker)

    def _on_pipe_end(self, worker: PooledWorker) -> None:
        """It has died, which the sentinel tells, or it has closed its pipe and lives."""
        if worker.sentinel is None:
            self._births.ask_how_it_died(worker.pid)
        if worker.stage is not Stage.KILLED:
            worker.deadline = min(worker.deadline, time.monotonic() + _LEAVE_SECONDS)
            self._alarm.set(worker.deadline)

    def _on_sentinel(self, worker: PooledWorker) -> None:
        """It is dead; who reaped it will tell how."""
        if not worker.watched:  # buried earlier in this round
            return
        self._forget_sentinel(worker)
        self._mark_dead(worker)
        if worker.source_number != self._births.source_number:
            self._bury(worker)  # its zygote is gone: nobody will
            return
        self._alarm.set(worker.deadline)
        self._births.ask_how_it_died(worker.pid)

    def _mark_dead(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            if worker.stage is not Stage.DEAD:
                worker.died_idle = worker.stage is Stage.IDLE
                self._pools.of(worker).enter(
                    worker, Stage.DEAD, deadline=time.monotonic() + _STATUS_SECONDS
                )

    def on_exited(self, exited: Exited) -> None:
        """Its status is known: bury it."""
        for worker in self._pools.workers():
            if worker.pid == exited.pid and worker.source_number == self._births.source_number:
                worker.exited = exited
                self._bury(worker)
                return

    def _bury(self, worker: PooledWorker) -> None:
        """Hear its last words, end what it left, tell how it died, take it off the books."""
        self._mark_dead(worker)
        while not worker.pipe_ended and self._read_pipe(worker):
            pass
        self._forget_pipe(worker)
        left = trees.end_survivors(worker)
        cgroup = self._cgroups.reading(worker, always=worker.run is not None)
        with self._pools.lock:
            pool = self._pools.of(worker)
            run = pool.unassign(worker)
            pool.remove(worker)
            if run is not None:
                self._pools.forget(run)
        self._settle_log(worker, run)
        if run is not None:
            self._events.append(deaths.death(worker, run, cgroup, self._log_tail_lines))
            self._freed.add(worker.schedule)
        elif worker.died_idle and worker.tasks_run == 0:
            self._births.count_failure(f"worker {worker.name} died before its first task")
        if left:
            log.info("worker %s left processes %s, which were ended", worker.name, left)
        self._close_descriptors(worker)

    @staticmethod
    def _settle_log(worker: PooledWorker, run: Run | None) -> None:
        if worker.schedule == SHORT and worker.log_path:
            scratch = scratch_path(worker.log_path, worker.name, worker.pid)
            settle(scratch, None if run is None else run.task.log_path)

    # ------------------------------------------------------------------ deadlines

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if not self._alarm.is_due(now):
            return
        for worker in self._pools.workers():
            if worker.deadline <= now:
                self._on_deadline(worker)
        if (offender := self._memory.look_when_due(now)) is not None:
            self._kill(offender)
        self._births.act_on_silence(now)
        if now >= self._stop_deadline:
            self._kill_all()
        self._alarm.wind_up(lambda: self._next_deadline(now))

    def _next_deadline(self, now: float) -> float:
        return min(
            self._stop_alarm(now),
            self._births.deadline(now),
            self._memory.deadline(),
            *(worker.deadline for worker in self._pools.workers()),
        )

    def _on_deadline(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            stage = worker.stage
            pool = self._pools.of(worker)
            worker.deadline = math.inf
            if stage is Stage.RUNNING and worker.run is not None and not worker.pipe_ended:
                self.stop_run(worker.run, StopReason.TIMED_OUT, self._grace_seconds)
                return
            if stage is Stage.IDLE:
                pool.enter(worker, Stage.LEAVING)
        if stage is Stage.IDLE:
            self._see_off(worker, kill=worker.pipe_ended)
        elif stage is Stage.DEAD:
            self._bury(worker)
        elif stage is not Stage.KILLED:
            self._kill(worker)

    def _stop_alarm(self, now: float) -> float:
        return self._stop_deadline if self._stop_deadline > now else math.inf

    # ------------------------------------------------------------------ what is told of births

    def on_forked(self, forked: Forked) -> None:
        """A worker exists: employ it."""
        pool = self._pools.named(forked.name)
        ordinal = ordinal_of(forked.name)
        worker = PooledWorker(
            name=forked.name,
            schedule=pool.schedule,
            ordinal=ordinal,
            guaranteed=ordinal <= pool.guaranteed,
            pid=forked.pid,
            started_at=trees.started_at(forked.pid),
            pipe=forked.pipe,
            sentinel=forked.sentinel,
            source_number=self._births.source_number,
            born=time.monotonic(),
            born_bytes=anonymous_bytes(forked.pid),
        )
        self._cgroups.join(worker)
        self._selector.register(worker.pipe, selectors.EVENT_READ, partial(self._on_pipe, worker))
        if worker.sentinel is not None:
            self._selector.register(
                worker.sentinel, selectors.EVENT_READ, partial(self._on_sentinel, worker)
            )
        with self._pools.lock:
            pool.add(worker)
            if not self.is_stopping:
                self._employ(pool, worker)
                return
            pool.enter(worker, Stage.LEAVING)
        self._see_off(worker, kill=False)

    def on_source_lost(self) -> None:
        """The zygote is of no use. Its workers are: they finish what they do, and leave."""
        for worker in self._pools.workers():
            if worker.stage is Stage.DEAD:
                self._bury(worker)
            elif worker.stage is Stage.IDLE:
                self._dismiss_idle(worker)

    def _dismiss_idle(self, worker: PooledWorker) -> None:
        with self._pools.lock:
            if worker.stage is not Stage.IDLE:  # a task was submitted just now
                return
            self._pools.of(worker).enter(worker, Stage.LEAVING)
        self._see_off(worker, kill=False)

    def on_no_births(self, why: str) -> None:
        """Nothing can be started: tell the waiting tasks, rather than let them hang."""
        log.error("no worker can be started: %s", why)
        for run in self._take_waiting():
            self._events.append(deaths.never_started(run, why, stopped=False))

    def _take_waiting(self) -> list[Run]:
        with self._pools.lock:
            taken: list[Run] = []
            for pool in self._pools.by_schedule.values():
                if pool.waiting:
                    self._freed.add(pool.schedule)
                taken += pool.waiting
                pool.waiting.clear()
            for run in taken:
                self._pools.forget(run)
        return taken

    # ------------------------------------------------------------------ stopping

    @property
    def is_stopping(self) -> bool:
        """Whether we were asked to stop."""
        return self._stop_deadline != math.inf

    def _is_done(self) -> bool:
        """Whether we were asked to stop and nothing is left; on the way there, what is left is
        told to stop.
        """
        if not self.is_stopping:
            return False
        self._tell_all_to_stop()
        self._tell()
        asked = any(pool.asked for pool in self._pools.by_schedule.values())
        waits_for_forks = asked and time.monotonic() < self._stop_deadline
        return not self._pools.workers() and not waits_for_forks

    def _tell_all_to_stop(self) -> None:
        for run in self._take_waiting():
            self._events.append(deaths.never_started(run, "the executor was stopped", stopped=True))
        now = time.monotonic()
        for worker in self._pools.workers():
            self._dismiss_idle(worker)
            with self._pools.lock:
                if worker.run is not None:
                    grace = max(0.0, self._stop_deadline - now)
                    self.stop_run(worker.run, StopReason.SHUT_DOWN, grace)
        self._alarm.set(self._stop_alarm(now))

    def _kill_all(self) -> None:
        for worker in self._pools.workers():
            if worker.stage not in (Stage.KILLED, Stage.DEAD):
                self._kill(worker)

    def _close(self) -> None:
        self._births.close()
        self._cgroups.close()
        self._selector.unregister(self._alarm)

    # ------------------------------------------------------------------ descriptors

    def _signal(self, worker: PooledWorker, number: signal.Signals) -> None:
        if worker.stage is not Stage.DEAD:
            signal_group(worker.pid, worker.sentinel, number)

    def _watch_pipe(self, worker: PooledWorker, *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        self._selector.modify(worker.pipe, events, partial(self._on_pipe, worker))

    def _forget_pipe(self, worker: PooledWorker) -> None:
        if not worker.pipe_ended:
            worker.pipe_ended = True
            self._selector.unregister(worker.pipe)

    def _forget_sentinel(self, worker: PooledWorker) -> None:
        """Wait for it no more; it stays open, as the identity of the group, until the burial."""
        if worker.watched and worker.sentinel is not None:
            worker.watched = False
            self._selector.unregister(worker.sentinel)

    def _close_descriptors(self, worker: PooledWorker) -> None:
        self._forget_sentinel(worker)
        worker.pipe.close()
        if worker.sentinel is not None:
            os.close(worker.sentinel)
