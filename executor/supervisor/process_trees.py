# SPDX-License-Identifier: Apache-2.0
"""Ends a worker's whole process tree, and what a worker has left behind.

While a worker lives, all its descendants can be found, also those that made a session of their
own. Afterwards its process group, its session and its cgroup identify them. A process that must
outlive a worker (a replica's shim) is a grandchild in a session of its own, and leaves the worker's
cgroup.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

from ...system.process.process_identity import ProcessIdentity
from ...system.process.tree import stop_tree, tree_of
from ..spawning.source import signal_group
from .pool import PooledWorker


def kill_tree(worker: PooledWorker) -> None:
    """Send SIGKILL to the worker and all its descendants, without waiting for their exit."""
    # Found before the worker exits: afterwards they are another process's children.
    members = tree_of(worker.pid, cgroup=worker.cgroup)
    signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(PermissionError):
            member.signal(signal.SIGKILL)


def kill_leftovers(worker: PooledWorker) -> list[int]:
    """Send SIGKILL to what an exited worker left; returns the pids that were found.

    Looking through all processes costs milliseconds, so it is done when there is reason to: the
    worker exited under a task, or some of its process group is left.
    """
    left_group = signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    left_inside = worker.cgroup is not None and worker.cgroup.pids()
    if worker.run is None and not left_group and not left_inside:
        return []
    identity = ProcessIdentity(worker.pid, worker.started_at)
    return stop_tree(identity, grace_seconds=0.0, cgroup=worker.cgroup)


def sweep_orphans(records: Iterable[tuple[int, float]]) -> list[int]:
    """End every worker of `(pid, started_at)` that still lives, its whole session with it.

    Workers of a killed daemon are named so by its database. As a rule none is left: the kernel
    ends a worker's process group with its daemon (`worker/parent_death.py`). This is for a machine
    where that does not exist or was defeated. A pid that now belongs to another process is left
    alone. Returns the pids that were ended.
    """
    ended = []
    for pid, started_at in records:
        identity = ProcessIdentity(pid, started_at)
        if identity.is_alive():
            stop_tree(identity, grace_seconds=0.0, session=True)
            ended.append(pid)
    return ended
