# SPDX-License-Identifier: Apache-2.0
"""The one thread that waits on pipes, sentinels, the worker source and an alarm, and has them acted
on. The data flow and the failure cases of the executor stand in `executor.py`.

A round: wait, let each thing that is ready speak, act on deadlines that have passed, ask for
workers that are wanted, tell the events. No round blocks, and nothing is polled: a deadline is what
ends a wait early.

    wait ──▶ alarm.py  ─ it rang, or a deadline has passed ──▶ below, memory_watch.py
         ──▶ births.py ─ on_born ───▶ handover.py     a task for the new worker, or none yet
                       ─ on_exited ─▶ burials.py
         ──▶ wires.py  ─ on_frame ──▶ conclusions.py ──▶ handover.py   its worker's next task
                                                     └─▶ dismissals.py or it leaves
                       ─ on_death ──▶ burials.py
    tell ──▶ outbox.py   the events of all of them

It does *not* decide (`decisions.py`), count (`pool.py`) or explain (`deaths.py`).

Two locks: the pools' (`Pools.lock`), which whoever changes the books holds; inside it the alarm's
own. Other threads call `hand_over` and `stop_run`, which need the former held, `notify` and `ring`,
which do not, and `start` and `stop`. All else, in the modules above too, is this thread's, unless
it says otherwise.
"""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from ..messages import EventSink, ExecutorEvent, Started
from ..policy.plan import Plan
from ..spawning.source import Exited, SourceFactory
from .assignment import Handover
from .channels import Wires
from .event_buffer import Outbox
from .memory_watch import MemoryWatch
from .pool import Pool, PooledWorker, Pools, Run, Stage, StopReason
from .reaping import Burials
from .results import Conclusions
from .starting import Births
from .stopping import Dismissals
from .wakeup import Alarm
from .worker_cgroups import WorkerCgroups

log = logging.getLogger(__name__)


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
        self._grace_seconds = grace_seconds
        self._stop_deadline = math.inf  # finite once we are asked to stop

        self._selector = selectors.DefaultSelector()
        self._alarm = alarm = Alarm()
        self._outbox = outbox = Outbox(on_event)
        self._wires = wires = Wires(self._selector, alarm, pools.lock, self)
        self._births = births = Births(pools, alarm, self._selector, make_source, self)
        self._memory = MemoryWatch(pools, alarm, cgroups, plan)
        self._dismissals = Dismissals(pools, alarm)
        self._handover = Handover(pools, alarm, wires, cgroups, self._memory, outbox)
        self._conclusions = Conclusions(
            pools, births, self._handover, self._dismissals, cgroups, outbox, log_tail_lines
        )
        self._burials = Burials(pools, alarm, births, wires, cgroups, outbox, log_tail_lines)
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
        self._outbox.notify(event)

    def ring(self) -> None:
        """Wake the thread up; once is enough until it has woken."""
        self._alarm.ring()

    def hand_over(self, pool: Pool, worker: PooledWorker, run: Run) -> Started:
        """Give an idle worker the task. Call it under the lock."""
        return self._handover.hand_over(pool, worker, run, time.monotonic())

    def stop_run(self, run: Run, reason: StopReason, grace_seconds: float) -> None:
        """Tell a running task to stop; it is killed after the grace. Call it under the lock."""
        self._dismissals.stop_run(run, reason, grace_seconds)

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
                self._outbox.tell()
        finally:
            self._close()

    def _wait(self) -> list[Callable[[], None]]:
        ready = self._selector.select(self._alarm.seconds_left(time.monotonic()))
        # Notices first: a task's `Started` was noted before its frame was sent.
        self._take_notices()
        return [key.data for key, _ in ready]

    def _take_notices(self) -> None:
        self._outbox.take_notices()
        self._wires.watch_clogged()

    # ------------------------------------------------------------------ what is heard of workers

    def on_frame(self, worker: PooledWorker, frame: dict[str, Any]) -> None:
        """It says something."""
        self._conclusions.on_frame(worker, frame)

    def on_pipe_end(self, worker: PooledWorker) -> None:
        """It will say nothing more."""
        self._burials.on_pipe_end(worker)

    def on_death(self, worker: PooledWorker) -> None:
        """Its sentinel tells that it is dead."""
        self._burials.on_death(worker)

    def on_exited(self, exited: Exited) -> None:
        """Its source tells how it died."""
        self._burials.on_exited(exited)

    def on_born(self, worker: PooledWorker) -> None:
        """It exists: employ it."""
        self._cgroups.join(worker)
        self._wires.connect(worker)
        with self._pools.lock:
            pool = self._pools.of(worker)
            pool.add(worker)
            if not self.is_stopping:
                self._handover.employ(pool, worker)
                return
            pool.enter(worker, Stage.LEAVING)
        self._dismissals.see_off(worker)

    def on_source_lost(self) -> None:
        """The zygote is of no use. Its workers are: they finish what they do, and leave."""
        for worker in self._pools.workers():
            if worker.stage is Stage.DEAD:
                self._burials.bury(worker)
            elif worker.stage is Stage.IDLE:
                self._dismissals.dismiss_idle(worker)

    def on_no_births(self, why: str) -> None:
        """Nothing can be started."""
        log.error("no worker can be started: %s", why)
        self._handover.refuse_waiting(why, stopped=False)

    # ------------------------------------------------------------------ deadlines

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if not self._alarm.is_due(now):
            return
        for worker in self._pools.workers():
            if worker.deadline <= now:
                self._on_deadline(worker)
        if (offender := self._memory.look_when_due(now)) is not None:
            self._dismissals.kill(offender)
        self._births.act_on_silence(now)
        if now >= self._stop_deadline:
            self._dismissals.kill_all()
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
            worker.deadline = math.inf
            if stage is Stage.RUNNING and worker.run is not None and not worker.pipe_ended:
                self.stop_run(worker.run, StopReason.TIMED_OUT, self._grace_seconds)
                return
            if stage is Stage.IDLE:
                self._pools.of(worker).enter(worker, Stage.LEAVING)
        if stage is Stage.IDLE and not worker.pipe_ended:
            self._dismissals.see_off(worker)
        elif stage is Stage.DEAD:
            self._burials.bury(worker)
        elif stage is not Stage.KILLED:
            self._dismissals.kill(worker)

    def _stop_alarm(self, now: float) -> float:
        return self._stop_deadline if self._stop_deadline > now else math.inf

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
        self._outbox.tell()
        asked = any(pool.asked for pool in self._pools.by_schedule.values())
        waits_for_forks = asked and time.monotonic() < self._stop_deadline
        return not self._pools.workers() and not waits_for_forks

    def _tell_all_to_stop(self) -> None:
        self._handover.refuse_waiting("the executor was stopped", stopped=True)
        now = time.monotonic()
        self._dismissals.stop_all(now, self._stop_deadline)
        self._alarm.set(self._stop_alarm(now))

    def _close(self) -> None:
        self._births.close()
        self._cgroups.close()
        self._selector.unregister(self._alarm)
