# SPDX-License-Identifier: Apache-2.0
"""`BurstableExecutor` runs tasks in guaranteed and burst workers, and reports how each ended.

The data flow, and who owns what:

      dispatcher thread              supervisor thread                        processes
    ┌──────────────────┐         ┌──────────────────────────┐
    │ submit(task) ────┼─ frame ─┼──────────────────────────┼── pipe ──────▶ worker long-1
    │                  │         │                          │                  │
    │                  │ wake-up │  wait: wake-up           │◀─ pipe ──────────┘ progress, outcome
    │ cancel(id) ──────┼────────▶│        every pipe        │◀─ pidfd ───────── its exit
    │   └─ SIGTERM ────┼─────────┼────────every sentinel────┼──────────────▶
    │                  │         │        the zygote's      │◀─ socket ────── zygote: forked, exited
    │                  │◀────────┼─ on_event(event)         │── "fork" ──────▶   └─ forks workers
    └──────────────────┘         └──────────────────────────┘
                                                     death pipe (held open by the daemon, never
                                                     written): its end kills every worker

* **The lock** (`Pools.lock`) guards the bookkeeping: which workers are idle, which run what, which
  tasks wait. A thread that holds it neither blocks nor calls out: it sends a frame without waiting,
  or a signal, and that is all. `on_event` is called without it, so a sink may call `submit` or
  `cancel`. A second lock, inside it, guards nothing but the time of the next wake-up.
* **The supervisor thread** alone reads pipes, reaps workers, talks to the zygote and calls
  `on_event`. `submit` and `cancel` act at once on the caller's thread: the one writes the frame to
  an idle worker's pipe, the other signals; neither waits for the supervisor. Methods for other
  threads say so; all else, in the folder `supervisor/` too, is this thread's.
* **A pipe** (a Unix socket pair) belongs to one worker and the daemon. Nothing is shared between
  workers: when one is killed, no lock and no queue of another is left held.
* **The zygote** is single-threaded and only forks. It reaps its children and reports the exit
  status of workers. The daemon never forks: it has threads. `fork` has the zygote fork a process
  that is no worker, for a part of the daemon that needs one for good.

Failure cases, and what the executor makes of them:

| what happens                               | what it does                                        |
|--------------------------------------------|-----------------------------------------------------|
| operation raises, or calls `sys.exit`      | `Raised`; the worker continues                      |
| operation raises `MemoryError`             | `Died` (out of memory, by `MemoryError`); recycled  |
| result is no JSON                          | `Raised` (a `TypeError` naming the type)            |
| worker exits, segfaults, is killed         | what it had already sent counts; else `Died`        |
| its cgroup's `oom_kill` moved              | `Died` (out of memory), also when only a grandchild |
|                                            | was the victim and the operation raised             |
| it exceeds its cap and has no cgroup       | the watchdog kills its tree; `Died` (out of memory) |
| it runs past its time-out                  | SIGTERM, grace, SIGKILL of the tree; `Died`         |
| cancelled while waiting for a worker       | `Cancelled`, never started                          |
| cancelled while receiving or running       | SIGTERM, grace, SIGKILL of the tree; `Cancelled`    |
| cancelled while returning                  | the result counts: `Succeeded`                      |
| it closes its pipe and does not exit       | its tree is killed; `Died`                          |
| it leaves children or threads behind       | its outcome counts; its tree is killed, recycled    |
| zygote exits                               | running tasks go on; a new zygote is started with   |
|                                            | back-off, and every worker of the old one is        |
|                                            | replaced once it is idle. If one of them exits      |
|                                            | meanwhile, its exit status is not known: `LOST`     |
| zygote does not answer for long            | killed, and as above                                |
| zygote finds threads in itself             | ended; workers are spawned from then on             |
| zygote is lost, hangs or refuses in `fork` | `fork` returns False, after the time of silence at  |
|                                            | most; a hanging zygote is killed, and as above      |
| zygote or workers cannot be started        | retried with back-off; after some attempts the      |
|                                            | waiting tasks are `Died`, rather than hang          |
| daemon is killed                           | the death pipe closes: the kernel kills every       |
|                                            | worker's process group, the zygote exits            |

A worker that was asked to stop is never given another task, so a signal that arrives late can only
ever meet its own task.
"""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ..system.memory.usage import anonymous_bytes
from ..system.process.exit_reason import ExitKind
from ..system.process.proc import resident_bytes
from ..system.text.json_lines import Json
from .errors import NoRoom, NotRunning
from .messages import LONG, EventSink, ExecutorStatus, Started, Task
from .policy.memory import FreeMemory, Timing
from .policy.plan import Plan
from .spawning.source import FORK_IS_SAFE, SubprocessSource, WorkerSource, ZygoteClient
from .supervisor.channels import Channels, WakeUp
from .supervisor.lifecycle import Lifecycle, WorkerStarter
from .supervisor.memory import AvailableMemory, WorkerMemory
from .supervisor.pool import Pools, Run, StopReason, task_frame
from .supervisor.tasks import EventBuffer, Tasks

if TYPE_CHECKING:
    from .spawning.zygote import PreforkedZygote


class BurstableExecutor:
    """Runs tasks in worker processes within a plan.

    Thread-safe, except that `start` and `stop` belong to one thread (never the supervisor's).
    Every event reaches `on_event` on the supervisor thread, and `Started` comes before the outcome
    of its task, unless `submit` has returned it. `on_event` must return at once, and may call
    everything but `start` and `stop`.
    An executor runs once.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        preload: Sequence[str],
        home: str,
        on_event: EventSink,
        cancel_grace_seconds: float = 5.0,
        use_zygote: bool = FORK_IS_SAFE,
        use_cgroups: bool = True,
        preforked_zygote: PreforkedZygote | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Make an executor, which `start` starts.

        The zygote imports the modules of `preload` once; the first one may have been forked before
        there were threads, and a later one is a program of its own. `home` is the workers' folder,
        which is passed to operations. The grace is from SIGTERM to SIGKILL, when a task is
        cancelled or timed out; `Died` carries some last lines of the log. Without a zygote each
        worker is a program of its own; without cgroups a watchdog holds workers to their caps.
        """
        self._plan = plan
        self._preload = preload
        self._home = home
        self._grace_seconds = cancel_grace_seconds
        self._use_zygote = use_zygote
        self._preforked_zygote = preforked_zygote
        self._timing = timing = timing or Timing()
        self._pools = pools = Pools(plan)
        self._available = AvailableMemory(plan.reserve_bytes)  # under the pools' lock
        self._running = False  # under the pools' lock
        self._stop_deadline = math.inf  # finite once the executor is to stop
        self._death_pipe: tuple[int, int] = (-1, -1)
        self._selector = selectors.DefaultSelector()
        self._wake_up = wake_up = WakeUp()
        self._events = events = EventBuffer(on_event)
        self._channels = channels = Channels(self._selector, wake_up, pools.lock)
        self._memory = memory = WorkerMemory(pools, wake_up, plan, timing, use_cgroups=use_cgroups)
        self._tasks = tasks = Tasks(pools, wake_up, channels, memory, events, timing)
        self._starter = starter = WorkerStarter(
            pools, wake_up, self._selector, self._make_source, tasks, timing
        )
        self._lifecycle = Lifecycle(
            starter, pools, wake_up, channels, memory, tasks, timing, cancel_grace_seconds
        )
        starter.on_readable = self._lifecycle.on_source
        self._thread = threading.Thread(target=self._run, name="executor-supervisor", daemon=True)

    def start(self) -> None:
        """Start the zygote and the thread; returns before the zygote is ready.

        Raises `OSError`: this interpreter cannot be started a second time.
        """
        # It is never written. Workers hold the reading end, the daemon alone the writing one.
        first = self._preforked_zygote
        self._death_pipe = os.pipe() if first is None else first.death_pipe
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._wake_up.clear)
        self._starter.start()
        self._thread.start()
        with self._pools.lock:
            self._running = True

    def room(self, schedule: str) -> int:
        """Return how many tasks of `schedule` may be submitted right now."""
        with self._pools.lock:
            return self._pools.by_schedule[schedule].room() if self._running else 0

    def free_memory(self, schedule: str) -> FreeMemory:
        """Return the memory that tasks of `schedule` may take if they are submitted now."""
        with self._pools.lock:
            pools = self._pools.by_schedule
            pool = pools[schedule]
            beyond = sum(each.beyond_shares_bytes() for each in pools.values())
            expected = sum(each.expected_bytes for each in pools.values())
            available = self._available.read(self._held_bytes, expected)
            return FreeMemory(
                schedule,
                burst_bytes=self._plan.burst_bytes - beyond,
                available_bytes=available,
                share_bytes=pool.share_bytes,
                guaranteed_free=max(0, pool.guaranteed - pool.runs),
                is_alone=pool.runs == 0,
            )

    def _held_bytes(self) -> int:
        """Return the memory of busy workers, without what they share with the zygote."""
        busy = (worker for worker in self._pools.workers() if worker.run is not None)
        return sum(max(0, anonymous_bytes(w.pid) - w.inherited_bytes) for w in busy)

    def submit(self, task: Task) -> Started | None:
        """Run a task.

        Returns `Started` when an idle worker takes it. When a worker has to be forked, `on_event`
        gets it later.

        Raises:
            NoRoom: `room` was 0.
            NotRunning: before `start` or after `stop`.
            TypeError, FrameError: the payload is not JSON, or is too large.
        """
        run = Run(task, task_frame(task))
        with self._pools.lock:
            if not self._running:
                raise NotRunning("the executor is not running")
            pool = self._pools.by_schedule[task.schedule]
            if not pool.room():
                raise NoRoom(f"{pool.capacity} {task.schedule} tasks are under way already")
            self._pools.add_run(run)
            self._available.commit(task.expected_bytes)
            return self._tasks.place(run)

    def cancel(self, task_id: str) -> bool:
        """Cancel a task at once; False when no such task waits or runs here."""
        with self._pools.lock:
            run = self._pools.runs.get(task_id)
            if run is None:
                return False
            if run.worker is None:
                self._tasks.withdraw(run)
            else:
                self._lifecycle.stop_run(run, StopReason.CANCELLED, self._grace_seconds)
        return True

    def fork(self, entry: str, payload: Json, fds: Sequence[int]) -> bool:
        """Fork a process that is no worker, and that outlives the daemon; any thread, and blocks.

        It calls `entry` (`module:function`) with the payload and the descriptors, of which it has
        copies. False when none was forked; the caller then starts a program.
        """
        return self._starter.fork(entry, payload, fds)

    def status(self) -> ExecutorStatus:
        """Describe every worker with its memory, and the plan."""
        with self._pools.lock:
            workers = [worker.status(self._plan) for worker in self._pools.workers()]
        free = self.free_memory(LONG)
        return ExecutorStatus(
            [replace(worker, rss_bytes=resident_bytes(worker.pid)[0]) for worker in workers],
            asdict(self._plan),
            free.burst_bytes,
            free.available_bytes,
            self._starter.zygote_pid,
        )

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End every task and worker, the zygote and the thread; returns when all are gone."""
        with self._pools.lock:
            was_running, self._running = self._running, False
        if not was_running:
            return
        self._stop_deadline = time.monotonic() + grace_seconds
        self._pools.is_stopping = True
        self._wake_up.wake()
        self._thread.join()
        self._selector.close()
        self._wake_up.close()
        for end in self._death_pipe:
            os.close(end)

    def _make_source(self, may_preload: bool, may_fork: bool) -> WorkerSource:
        death_pipe = self._death_pipe[0]
        if not (may_fork and self._use_zygote):
            return SubprocessSource(death_pipe=death_pipe, home=self._home)
        first, self._preforked_zygote = self._preforked_zygote, None
        if first is not None:
            return ZygoteClient.adopt(first)
        preload = self._preload if may_preload else ()
        return ZygoteClient.start(death_pipe=death_pipe, home=self._home, preload=preload)

    def _run(self) -> None:
        """Run rounds, on the supervisor thread, until the executor was stopped and all are gone.

        A round: wait, handle all that is ready, act on deadlines that have passed, request the
        workers that are needed, deliver the events. No round blocks, and nothing is polled: a wait
        ends when something is ready, or at a deadline.
        """
        try:
            while not self._is_done():
                for key, _ in self._selector.select(self._wake_up.seconds_left(time.monotonic())):
                    key.data()
                self._channels.watch_blocked()
                self._act_on_deadlines()
                self._starter.request_workers()
                self._events.deliver()
        finally:
            self._starter.close(self._timing.source_exit)
            self._memory.close()
            self._selector.unregister(self._wake_up)

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if not self._wake_up.is_due(now):
            return
        self._lifecycle.act_on_deadlines(now)
        if now >= self._stop_deadline:
            self._lifecycle.kill_all()
        self._wake_up.set_next(
            lambda: min(self._stop_alarm(now), self._lifecycle.next_deadline(now))
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
        self._tasks.refuse_waiting(ExitKind.STOPPED, "the executor was stopped")
        self._lifecycle.stop_all(now, self._stop_deadline)
        self._wake_up.wake_by(self._stop_alarm(now))
        self._events.deliver()
        requested = any(pool.requested for pool in self._pools.by_schedule.values())
        waits_for_forks = requested and time.monotonic() < self._stop_deadline
        return not self._pools.workers() and not waits_for_forks
