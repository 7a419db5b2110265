# SPDX-License-Identifier: Apache-2.0
"""Runs named operations in worker processes. Knows no HTTP and no SQL.

Where to look:

    executor.py      `BurstableExecutor`, the façade; its docstring draws the data flow
    supervisor.py    the one thread that waits on pipes, sentinels and an alarm, and its loop:
      alarm.py         what ends its wait
      births.py        how workers come to be, and what is made of a source's failures
      wires.py         the daemon's ends of the workers' pipes, and their sentinels
      handover.py      how a task gets to a worker
      conclusions.py   what becomes of what a worker says: a task's outcome, its worker's next one
      dismissals.py    how a living worker is brought to its end
      burials.py       how a death is noticed, and what is done then
      memory_watch.py  what is looked at while workers have tasks
      outbox.py        what it has to tell, until the end of a round
    pool.py          who is idle, who runs what, who waits: bookkeeping without effects
    decisions.py     pure policy: bursting, idling out, recycling, back-off
    plan.py          how many workers the machine can bear
    admission.py     pure policy: which waiting tasks may start now, by memory
    machine_gauge.py what the machine would still give
    watchdog.py      caps for workers that have no cgroup
    deaths.py        a task's end as an event; a death explained by its evidence
    trees.py         ending a worker's process tree, and what is left of one
    worker_cgroups.py, cgroup_factory.py
                     one memory cgroup per worker, kept by name
    sources.py       where workers come from: the interface of the next two
    zygote_link.py   the daemon's end of the zygote: start it, ask it for workers
    first_zygote.py  a daemon's first zygote, forked before the daemon grows
    zygote.py        the small process that workers are forked from
    spawn.py         the same interface without fork, for macOS
    lifeline.py      how the kernel ends workers with their daemon
    worker.py        what runs in a worker: one task at a time
    task_log.py      where a task's output goes
    frames.py        JSON over a worker's pipe
    orphans.py       ending workers that a killed daemon left
    messages.py      what crosses the executor's door
    errors.py        what it raises

Names are resolved on first use: the zygote and the workers import this package too, and must not
pay for the daemon's side of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ExecutorError, NoRoom, NotRunning, PlanError, TaskCancelled
    from .executor import BurstableExecutor
    from .policy.plan import Plan, plan_workers
    from .spawning.preforked_zygote import FirstZygote, fork_first_zygote
    from .supervisor.process_trees import sweep_orphans
    from .worker.task_log import settle_leftovers

_HOMES = {
    "BurstableExecutor": "executor",
    "ExecutorError": "errors",
    "FirstZygote": "spawning.preforked_zygote",
    "NoRoom": "errors",
    "NotRunning": "errors",
    "Plan": "policy.plan",
    "PlanError": "errors",
    "TaskCancelled": "errors",
    "fork_first_zygote": "spawning.preforked_zygote",
    "plan_workers": "policy.plan",
    "settle_leftovers": "worker.task_log",
    "sweep_orphans": "supervisor.process_trees",
}

__all__ = [
    "BurstableExecutor",
    "ExecutorError",
    "FirstZygote",
    "NoRoom",
    "NotRunning",
    "Plan",
    "PlanError",
    "TaskCancelled",
    "fork_first_zygote",
    "plan_workers",
    "settle_leftovers",
    "sweep_orphans",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
