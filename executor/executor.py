# SPDX-License-Identifier: Apache-2.0
"""`BurstableExecutor`: runs tasks in guaranteed and burst workers, and tells what became of them.

The data flow, and who owns what:

      dispatcher thread              supervisor thread                        processes
    ┌──────────────────┐         ┌──────────────────────────┐
    │ submit(task) ────┼─ frame ─┼──────────────────────────┼── pipe ──────▶ worker long-1
    │                  │         │                          │                  │
    │                  │ wake-up │  wait: wake-up           │◀─ pipe ──────────┘ progress, outcome
    │ cancel(id) ──────┼────────▶│        every pipe        │◀─ pidfd ───────── its death
    │   └─ SIGTERM ────┼─────────┼────────every sentinel────┼──────────────▶
    │                  │         │        the zygote's      │◀─ socket ─────── zygote: forked, exited
    │                  │◀────────┼─ on_event(event)         │── "fork" ──────▶   └─ forks workers
    └──────────────────┘         └──────────────────────────┘
                                                     lifeline (held open by the daemon, never
                                                     written): its end ends every worker

* **The lock** (`Pools.lock`) guards the books: who is idle, who runs what, who waits. Whoever holds
  it neither blocks nor calls out: under it a frame is sent without waiting, a signal is sent, and
  that is all. `on_event` is called without it, so a sink may call `submit` or `cancel`.
* **The supervisor thread** alone reads pipes, buries workers, talks to the zygote and calls
  `on_event`. `submit` and `cancel` act at once on the caller's thread: the one writes the frame to
  an idle worker's pipe, the other signals; neither waits for the supervisor.
* **A pipe** (a Unix socket pair) belongs to one worker and the daemon. Nothing is shared between
  workers: whoever dies, no lock and no queue of another is left held.
* **The zygote** is single-threaded and only forks. It reaps its children and tells their exit
  status. The daemon never forks: it has threads.

Failure cases, and what the executor makes of them:

| what happens                               | what it does                                        |
|--------------------------------------------|-----------------------------------------------------|
| operation raises, or calls `sys.exit`      | `Raised`; the worker goes on                        |
| operation raises `MemoryError`             | `Died` (out of memory, by `MemoryError`); recycled  |
| result is no JSON                          | `Raised` (a `TypeError` naming the type)            |
| worker exits, segfaults, is killed         | what it had already sent counts; else `Died`        |
| its cgroup's `oom_kill` moved              | `Died` (out of memory), also when only a grandchild |
|                                            | was the victim and the operation raised             |
| it runs past its time-out                  | SIGTERM, grace, SIGKILL of the tree; `Died`         |
| cancelled while waiting for a worker       | `Cancelled`, never started                          |
| cancelled while receiving or running       | SIGTERM, grace, SIGKILL of the tree; `Cancelled`    |
| cancelled while returning                  | the result counts: `Succeeded`                      |
| it closes its pipe and lives               | its tree is killed; `Died`                          |
| it leaves children or threads behind       | its outcome counts; its tree is killed, recycled    |
| zygote dies                                | running tasks go on; a new zygote is started with   |
|                                            | back-off, and every worker of the old one is        |
|                                            | replaced once it is idle. If one of them dies       |
|                                            | meanwhile, its exit status is not known: `LOST`     |
| zygote or workers cannot be started        | retried with back-off; after some attempts the      |
|                                            | waiting tasks are `Died`, rather than hang          |
| daemon is killed                           | the lifeline closes: the kernel kills every         |
|                                            | worker's process group, the zygote exits            |

A worker that was told to stop is never given another task, so a signal that arrives late can only
ever meet its own task.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import EventSink, ExecutorStatus, Task
from .plan import Plan


class BurstableExecutor:
    """Runs tasks in worker processes within a plan.

    Thread-safe, except that `start` and `stop` belong to one thread. Every event reaches
    `on_event` on the supervisor thread, and `Started` comes before the outcome of its task.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        preload: Sequence[str],
        home: str,
        on_event: EventSink,
        cancel_grace_seconds: float = 5.0,
        log_tail_lines: int = 20,
    ) -> None:
        self._plan = plan
        self._on_event = on_event

    def start(self) -> None:
        """Start the zygote and the guaranteed workers; returns before they are ready."""
        raise NotImplementedError

    def room(self, schedule: str) -> int:
        """How many tasks of `schedule` may be submitted right now."""
        raise NotImplementedError

    def submit(self, task: Task) -> None:
        """Run `task`; its worker may still have to be forked.

        Raises:
            NoRoom: `room` was 0.
            NotRunning: before `start` or after `stop`.
        """
        raise NotImplementedError

    def cancel(self, task_id: str) -> bool:
        """Cancel at once; False when no such task is waiting or running here."""
        raise NotImplementedError

    def status(self) -> ExecutorStatus:
        """Every worker, and the plan."""
        raise NotImplementedError

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End every task, worker, the zygote and the thread; returns when all are gone."""
        raise NotImplementedError
