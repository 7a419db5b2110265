# SPDX-License-Identifier: Apache-2.0
"""The one thread that waits for workers and acts on what they do.

A round: wait, handle all that is ready, act on deadlines that have passed, request the workers
that are needed, deliver the events. No round blocks, and nothing is polled: a wait ends when
something is ready, or at a deadline. This folder's docstring lists the modules that it calls.

Two locks: the pools' (`Pools.lock`), which is held for every change in the bookkeeping; inside it
the wake-up's own. Methods for other threads say so. All else, in the modules above too, is this
thread's.
"""

from __future__ import annotations

import math
import selectors
import threading
import time

from ..messages import EventSink
from ..policy.memory import Timing
from ..policy.plan import Plan
from ..spawning.source import SourceFactory
from .channels import Channels, WakeUp
from .lifecycle import Lifecycle, WorkerStarter
from .memory import WorkerMemory
from .pool import Pools
from .tasks import EventBuffer, Tasks


class Supervisor:
    """Owns the workers' processes; runs on a thread of its own.

    Other threads place and withdraw tasks through `tasks`, and stop one through `lifecycle`.
    """

    def __init__(
        self,
        pools: Pools,
        *,
        make_source: SourceFactory,
        plan: Plan,
        timing: Timing,
        use_cgroups: bool,
        on_event: EventSink,
        grace_seconds: float,
    ) -> None:
        self._pools = pools
        self._timing = timing
        self._stop_deadline = math.inf  # finite once the executor is to stop
        self._selector = selectors.DefaultSelector()
        self._wake_up = wake_up = WakeUp()
        self._events = events = EventBuffer(on_event)
        self._channels = channels = Channels(self._selector, wake_up, pools.lock)
        self._memory = memory = WorkerMemory(pools, wake_up, plan, timing, use_cgroups=use_cgroups)
        self.tasks = tasks = Tasks(pools, wake_up, channels, memory, events, timing)
        starter = WorkerStarter(
            pools, wake_up, self._selector, make_source, tasks, timing, self._on_source
        )
        self.lifecycle = Lifecycle(
            starter, pools, wake_up, channels, memory, tasks, timing, grace_seconds
        )
        self._thread = threading.Thread(target=self._run, name="executor-supervisor", daemon=True)

    def start(self) -> None:
        """Start the source of workers, and the thread."""
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._wake_up.clear)
        self.lifecycle.starter.start()
        self._thread.start()

    def stop(self, grace_seconds: float) -> None:
        """End everything; returns when it is gone. Another thread."""
        self._stop_deadline = time.monotonic() + grace_seconds
        self._pools.is_stopping = True
        self._wake_up.wake()
        self._thread.join()
        self._selector.close()
        self._wake_up.close()

    def _run(self) -> None:
        try:
            while not self._is_done():
                for key, _ in self._selector.select(self._wake_up.seconds_left(time.monotonic())):
                    key.data()
                self._channels.watch_blocked()
                self._act_on_deadlines()
                self.lifecycle.starter.request_workers()
                self._events.deliver()
        finally:
            self.lifecycle.starter.close(self._timing.source_exit)
            self._memory.close()
            self._selector.unregister(self._wake_up)

    def _on_source(self) -> None:
        self.lifecycle.on_source()

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if not self._wake_up.is_due(now):
            return
        self.lifecycle.act_on_deadlines(now)
        if now >= self._stop_deadline:
            self.lifecycle.kill_all()
        self._wake_up.set_next(
            lambda: min(self._stop_alarm(now), self.lifecycle.next_deadline(now))
        )

    def _stop_alarm(self, now: float) -> float:
        return self._stop_deadline if self._stop_deadline > now else math.inf

    def _is_done(self) -> bool:
        """Return whether the executor was asked to stop and nothing is left.

        Meanwhile, remaining workers are asked to stop.
        """
        if not self._pools.is_stopping:
            return False
        now = time.monotonic()
        self.tasks.refuse_waiting("the executor was stopped", stopped=True)
        self.lifecycle.stop_all(now, self._stop_deadline)
        self._wake_up.wake_by(self._stop_alarm(now))
        self._events.deliver()
        requested = any(pool.requested for pool in self._pools.by_schedule.values())
        waits_for_forks = requested and time.monotonic() < self._stop_deadline
        return not self._pools.workers() and not waits_for_forks
