# SPDX-License-Identifier: Apache-2.0
"""Runs named operations in worker processes. Knows no HTTP and no SQL.

Where to look:

    executor.py   `BurstableExecutor`, the façade; its docstring draws the data flow
    supervisor/   the one thread that starts workers, assigns tasks and reaps (see `loop.py`)
    spawning/     where workers come from: a zygote, or a program each where fork is not safe
    worker/       what runs in a worker: one task at a time, its log, its end with the daemon
    policy/       pure decisions: the plan, admission by memory, scaling, the watchdog; and `Timing`
    messages.py   the executor's messages: a task, events
    frames.py     JSON over a worker's pipe
    errors.py     what it raises

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
    from .spawning.preforked_zygote import PreforkedZygote, prefork_zygote
    from .supervisor.memory import sweep_cgroups
    from .supervisor.process_trees import sweep_orphans
    from .worker.task_log import settle_leftovers

_HOMES = {
    "BurstableExecutor": "executor",
    "ExecutorError": "errors",
    "PreforkedZygote": "spawning.preforked_zygote",
    "NoRoom": "errors",
    "NotRunning": "errors",
    "Plan": "policy.plan",
    "PlanError": "errors",
    "TaskCancelled": "errors",
    "prefork_zygote": "spawning.preforked_zygote",
    "plan_workers": "policy.plan",
    "settle_leftovers": "worker.task_log",
    "sweep_cgroups": "supervisor.memory",
    "sweep_orphans": "supervisor.process_trees",
}

__all__ = [
    "BurstableExecutor",
    "ExecutorError",
    "NoRoom",
    "NotRunning",
    "Plan",
    "PlanError",
    "PreforkedZygote",
    "TaskCancelled",
    "plan_workers",
    "prefork_zygote",
    "settle_leftovers",
    "sweep_cgroups",
    "sweep_orphans",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
