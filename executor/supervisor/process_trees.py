# SPDX-License-Identifier: Apache-2.0
"""What to do with a worker's tree when it must die, and with what is left of it when it has died.

While a worker lives, all its descendants can be found, also those that made a session of their
own. Afterwards its process group, its session and its cgroup still tell. What must outlive a
worker (a replica's shim) is a grandchild in a session of its own, and leaves the worker's cgroup.
"""

from __future__ import annotations

import contextlib
import signal

from ...processes.tree import stop_tree, tree_of
from ...system.process_identity import ProcessIdentity
from ..spawning.source import signal_group
from .pool import PooledWorker


def started_at(pid: int) -> float:
    """With the pid, the identity of a process; 0 when it is gone already."""
    try:
        return ProcessIdentity.of(pid).started_at
    except ProcessLookupError:
        return 0.0


def kill_tree(worker: PooledWorker) -> None:
    """SIGKILL to the worker and everything below it; does not wait for their end."""
    # Counted before it dies: afterwards they are somebody else's children.
    members = tree_of(worker.pid, cgroup=worker.cgroup)
    signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(PermissionError):
            member.signal(signal.SIGKILL)


def end_survivors(worker: PooledWorker) -> list[int]:
    """SIGKILL to what a dead worker left; returns the pids that were found.

    Looking through all processes costs milliseconds, so it is done when there is reason to: the
    worker died under a task, or some of its group is left.
    """
    left_group = signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    left_inside = worker.cgroup is not None and worker.cgroup.pids()
    if worker.run is None and not left_group and not left_inside:
        return []
    identity = ProcessIdentity(worker.pid, worker.started_at)
    return stop_tree(identity, grace_seconds=0.0, cgroup=worker.cgroup)
