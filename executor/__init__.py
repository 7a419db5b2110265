# SPDX-License-Identifier: Apache-2.0
"""Runs named operations in worker processes. Knows no HTTP and no SQL.

Where to look:

    executor.py   `BurstableExecutor`: the façade, and its thread; the docstring draws the data flow
    supervisor/   what the thread does: starts workers, assigns tasks, reaps
    spawning/     where workers come from: a zygote, or a program each where fork is not safe
    worker.py     what runs in a worker: one task at a time, its log, its end with the daemon
    policy/       pure decisions: the plan, admission by memory, scaling, the watchdog; and `Timing`
    messages.py   the executor's messages: a task, events; JSON over a worker's pipe
    errors.py     what it raises

It imports nothing itself: the zygote and the workers import this package, too, and must not pay for
the daemon's side of it.
"""
