# SPDX-License-Identifier: Apache-2.0
"""Workers' memory: their cgroups, a watchdog for those without one, the machine's free memory.

    new worker ──▶ join ────────▶ its cgroup, kept by name: `long-1` gets that of the last `long-1`
    task ──▶ apply_limit, note_busy ──▶ at a deadline, while any worker has a task:
                                          look at the cgroups' counters    (workers that have one)
                                          look for a worker over its cap   (the others)
    a task fails, a worker exits ──▶ evidence ──▶ `tasks.py`

Counters only grow, so `evidence` holds the increase since the last reading. A kill that a task
survives does not explain a later SIGKILL, so the counters are also read once a second. A SIGKILL is
explained only by an increase since the second-to-last of these reads. (The last read is too recent:
the kernel counts a kill before the victim has exited.)

The supervisor's thread reads the counters and runs the watchdog. `apply_limit`, `note_busy` and
`AvailableMemory` are used on any thread, under the pools' lock.

This module also ends a worker's whole process tree, and any processes that it left behind.

While a worker is alive, all its descendants can be found, including those that started a session of
their own. Afterwards its process group, its session and its cgroup identify them. A process that
must outlive a worker (a replica's shim) is a grandchild in a session of its own, and leaves the
worker's cgroup.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...system.memory.cgroups import Cgroup, CgroupManager, existing_groups
from ...system.memory.limits import available_memory_bytes
from ...system.memory.usage import tree_bytes
from ...system.process.diagnose import Evidence, kernel_line
from ...system.process.oom_evidence import OomCounters, read_oom_counters
from ...system.process.proc import read_stat
from ...system.process.process_identity import ProcessIdentity
from ...system.process.tree import signal_all, stop_tree, tree_of
from ..policy.memory import Timing, Usage, find_violation
from ..policy.plan import Plan
from ..spawning.source import signal_group
from .channels import WakeUp
from .pool import PooledWorker, Pools, Run

log = logging.getLogger(__name__)

_PREFIX = "executor-"  # a daemon's cgroups: `openenvd/executor-<its pid>/long-1`
_GAUGE_SECONDS = 0.1


@dataclass(eq=False, slots=True)
class _Group:
    """A worker's cgroup, with what was last set and read."""

    cgroup: Cgroup
    limit_bytes: int | None
    oom_kills: int  # at the last reading
    looks: tuple[int, int] = (0, 0)  # oom_kills at the last periodic read but one, and the last

    def read_counters(self) -> tuple[int, int, int | None]:
        """Return `oom_kills` at the last reading and now, and the peak since that reading."""
        before, after, peak = self.oom_kills, self.cgroup.oom_kills(), self.cgroup.peak_bytes()
        self.oom_kills = after
        if not self.cgroup.reset_peak() and after == before:
            peak = None  # it may be an earlier task's
        return before, after, peak


class WorkerMemory:
    """Enforces workers' memory caps, and gathers evidence of why they exited."""

    def __init__(
        self, pools: Pools, wake_up: WakeUp, plan: Plan, timing: Timing, *, use_cgroups: bool
    ) -> None:
        self._pools = pools
        self._wake_up = wake_up
        self._plan = plan
        self._timing = timing
        self._manager = _cgroup_manager() if use_cgroups else None
        self._groups: dict[str, _Group] = {}  # by the worker's name
        self._machine_looks: tuple[int | None, int | None] = (None, None)
        # Both under the pools' lock, and infinite while there is nothing to look at.
        self._watchdog_at = math.inf  # workers without a cgroup
        self._look_at = math.inf  # the cgroups of the others
        self._was_busy = False  # a worker with a cgroup had a task at the last read, or since

    def join(self, worker: PooledWorker) -> None:
        """Put a new worker into its cgroup, before it is given anything to do."""
        if self._manager is None:
            return
        try:
            if (group := self._groups.get(worker.name)) is None:
                limit = self._plan.worker_bytes
                cgroup = self._manager.create(worker.name, limit)
                group = _Group(cgroup, limit, cgroup.oom_kills())
                self._groups[worker.name] = group
            group.cgroup.add(worker.pid)
            worker.cgroup = group.cgroup
            group.looks = (kills := group.cgroup.oom_kills(), kills)
            if group.limit_bytes != self._plan.worker_bytes:
                # The last worker of the name exited under a task's own cap, which ends with it.
                self.apply_limit(worker, None)
        except OSError as exc:
            log.warning(
                "worker %s runs outside its cgroup: %s", worker.name, exc, extra=worker.log_fields
            )

    def apply_limit(self, worker: PooledWorker, limit_bytes: int | None) -> None:
        """Set the cap that the next task asked for; None for the plan's."""
        if worker.cgroup is None:
            return
        limit = self._plan.worker_bytes if limit_bytes is None else limit_bytes
        try:
            worker.cgroup.set_limit(limit)
            self._groups[worker.name].limit_bytes = limit
        except OSError as exc:
            text = "cannot set the memory limit of worker %s: %s"
            log.warning(text, worker.name, exc, extra=worker.log_fields)

    def close(self) -> None:
        """Remove every cgroup; one that still holds a process stays."""
        for name, group in self._groups.items():
            if not group.cgroup.remove():
                log.info("the cgroup of worker %s is not empty and is kept", name)
        self._groups.clear()
        if self._manager is not None:
            self._manager.remove()

    def evidence(
        self, worker: PooledWorker, run: Run, wait_status: int | None, *, has_exited: bool
    ) -> Evidence:
        """Gather what the kernel counted when a task has failed, or its worker has exited."""
        group = self._groups.get(worker.name)
        if group is None or worker.cgroup is None:
            # The machine's counter, which is dear: only LONG tasks note it as they start.
            before = OomCounters(vmstat=run.machine_oom_kills if has_exited else None)
            after = OomCounters() if before.vmstat is None else read_oom_counters(None)
            return Evidence(worker.pid, wait_status, before=before, after=after)
        old, new, peak = group.read_counters()
        if has_exited and (wait_status is None or wait_status & 0x7F == signal.SIGKILL):
            # After SIGKILL, only a recent kill can be the cause. If the worker exited on its own,
            # any earlier kill may be the cause, even one of a grandchild long ago.
            old = max(old, group.looks[0])
        line = None
        if new > old:
            since = run.started
            line = kernel_line(group.cgroup, worker.pid, since_monotonic=since, is_any=True)
        return Evidence(
            worker.pid,
            wait_status,
            before=OomCounters(old),
            after=OomCounters(new),
            kernel_log_line=line,
            cgroup_name=f"openenvd/{worker.name}",
            peak_bytes=peak,
            limit_bytes=group.limit_bytes,
        )

    def read_counters(self, worker: PooledWorker) -> None:
        """Exclude everything counted so far from the evidence of later tasks."""
        if worker.cgroup is not None:
            self._groups[worker.name].read_counters()

    def note_busy(self, worker: PooledWorker, now: float) -> None:
        """Start periodic checks, because a worker is getting a task. Under the pools' lock."""
        if worker.cgroup is None and self._watchdog_at == math.inf:
            self._watchdog_at = now + self._timing.watchdog
            self._wake_up.wake_by(self._watchdog_at)
        if worker.cgroup is not None and self._look_at == math.inf:
            self._look_at, self._was_busy = now + self._timing.cgroup_look, True
            self._wake_up.wake_by(self._look_at)

    def deadline(self) -> float:
        """Return when to look again."""
        return min(self._watchdog_at, self._look_at)

    def look_when_due(self, now: float) -> PooledWorker | None:
        """Run the checks that are due; return a worker to kill, its `limit_violation` set."""
        if now >= self._look_at:
            self.look_at_cgroups(now)
        return self._find_violator(now) if now >= self._watchdog_at else None

    def look_at_cgroups(self, now: float) -> None:
        """Read the counters, also twice after the last task, so that its kills are no later one's.

        Reads one file in all. It reads one for each worker only if the kernel has killed a process
        anywhere on the machine since the second-to-last read.
        """
        workers = self._pools.workers()
        before, last = self._machine_looks
        self._machine_looks = (last, kills := read_oom_counters(None).vmstat)
        if kills is None or not before == last == kills:
            for worker in workers:
                if worker.cgroup is not None:
                    group = self._groups[worker.name]
                    group.looks = (group.looks[1], group.cgroup.oom_kills())
        with self._pools.lock:
            is_busy = any(worker.run is not None for worker in workers)
            look_again = is_busy or self._was_busy
            self._look_at = now + self._timing.cgroup_look if look_again else math.inf
            self._was_busy = is_busy

    def _find_violator(self, now: float) -> PooledWorker | None:
        """Find the largest worker that exceeds its cap and has no cgroup to enforce it."""
        with self._pools.lock:
            watched = {
                worker.name: (worker, worker.run.task.memory_bytes or self._plan.worker_bytes)
                for worker in self._pools.workers()
                if worker.cgroup is None and worker.run and worker.limit_violation is None
            }
            self._watchdog_at = now + self._timing.watchdog if watched else math.inf
        violation = find_violation(
            [
                Usage(name, tree_bytes(worker.pid, worker.inherited_bytes), limit)
                for name, (worker, limit) in watched.items()
            ],
            available_bytes=available_memory_bytes() if watched else 0,
            reserve_bytes=self._plan.reserve_bytes,
        )
        if violation is None:
            return None
        worker, _ = watched[violation.name]
        log.warning(
            "killing worker %s: %s", worker.name, violation.evidence, extra=worker.log_fields
        )
        worker.limit_violation = violation
        return worker


class AvailableMemory:
    """The machine's available memory, less the reserve and the expected growth of running tasks.

    Read at most every 0.1 s. Tasks submitted in between count with the memory they are expected to
    need. Used under the pools' lock.
    """

    def __init__(self, reserve_bytes: int) -> None:
        self._reserve_bytes = reserve_bytes
        self._read_at = 0.0
        self._left_bytes = 0

    def commit(self, expected_bytes: int) -> None:
        """Take off what a submitted task is expected to need."""
        self._left_bytes -= expected_bytes

    def read(self, held_bytes: Callable[[], int], expected_bytes: int) -> int:
        """Return what is left for further tasks, in bytes."""
        now = time.monotonic()
        if now - self._read_at >= _GAUGE_SECONDS:
            self._read_at = now
            yet_to_grow = max(0, expected_bytes - held_bytes())
            self._left_bytes = available_memory_bytes() - self._reserve_bytes - yet_to_grow
        return self._left_bytes


def _cgroup_manager() -> CgroupManager | None:
    """Make this daemon's folder of cgroups; None where the system allows none."""
    manager = CgroupManager(f"{_PREFIX}{os.getpid()}")
    if not manager.available:
        log.info("workers have no cgroups of their own: %s", manager.why_not)
        return None
    sweep_cgroups()
    return manager


def sweep_cgroups() -> list[str]:
    """Remove the groups of daemons that have ended, and return their names.

    A daemon that waits to be reaped has ended, too. Groups that hold a process stay.
    """
    swept = []
    for group in existing_groups(f"{_PREFIX}*"):
        pid = os.path.basename(group.directory).removeprefix(_PREFIX)  # noqa: PTH119
        daemon = read_stat(int(pid)) if pid.isdigit() else None
        if (daemon is None or daemon.is_dead) and group.remove_with_children():
            swept.append(group.name)
    return swept


def kill_tree(worker: PooledWorker) -> None:
    """Send SIGKILL to the worker and all its descendants, without waiting for their exit."""
    # Find the descendants before the worker exits: afterwards they have another parent process.
    members = tree_of(worker.pid, cgroup=worker.cgroup)
    signal_group(worker.pid, worker.sentinel, signal.SIGKILL)
    signal_all(members, signal.SIGKILL)


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
    """End each worker of `(pid, started_at)` that is still alive, with its whole session.

    The database of a killed daemon lists its workers in this form. As a rule none is left: the
    kernel ends a worker's process group with its daemon (`worker.py`). This function is for
    machines where that mechanism does not exist or has failed. A pid that now belongs to another
    process is left alone. Returns the pids that were ended.
    """
    ended = []
    for pid, started_at in records:
        identity = ProcessIdentity(pid, started_at)
        if identity.is_alive():
            stop_tree(identity, grace_seconds=0.0, session=True)
            ended.append(pid)
    return ended
