# SPDX-License-Identifier: Apache-2.0
"""One memory cgroup per worker, kept by name: `long-1` gets the group of the `long-1` before it.

Where the system allows no cgroups, every method does nothing and `reading` says so. Counters only
ever grow, so a reading tells what moved since the last one. One during a task that then goes on is
no reason of a later end by SIGKILL, so they are looked at once a second too, while anybody has a
task: what a death is explained by is what moved since the last look but one. (Not the last: a kill
is counted before its victim is dead.) Used by the supervisor thread, and by
whoever submits (`apply_limit`, under the pools' lock).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...system.cgroups import Cgroup
from .pool import PooledWorker

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


# Makes the group of that name with that limit; None where there are no cgroups.
CgroupFactory = Callable[[str, int | None], Cgroup | None]


@dataclass(frozen=True, slots=True)
class CgroupReading:
    """What a worker's cgroup tells at the end of a task. Sizes in bytes."""

    name: str
    oom_kills_before: int
    oom_kills_after: int
    peak_bytes: int | None
    limit_bytes: int | None
    directory: str | None = None
    oom_kills_noted: int = 0  # at the last look but one

    @property
    def moved(self) -> bool:
        """Whether the kernel killed something in it for memory."""
        return self.oom_kills_after > self.oom_kills_before


class WorkerCgroups:
    """The workers' cgroups, by the workers' names."""

    def __init__(self, create: CgroupFactory | None, *, limit_bytes: int | None) -> None:
        self._create = create
        self._limit_bytes = limit_bytes
        self._groups: dict[str, Cgroup] = {}
        self._limits: dict[str, int | None] = {}
        self._oom_kills: dict[str, int] = {}  # at the last reading
        self._looks: dict[str, tuple[int, int]] = {}  # the last but one, and the last
        self._machine_looks: tuple[int | None, int | None] = (None, None)

    def join(self, worker: PooledWorker) -> None:
        """Put a new worker into its group, before it is given anything to do."""
        if self._create is None:
            return
        try:
            group = self._groups.get(worker.name) or self._make(worker.name, self._create)
            if group is not None:
                group.add(worker.pid)
                worker.cgroup = group
                self._looks[worker.name] = (kills := group.oom_kills(), kills)
                if self._limits[worker.name] != self._limit_bytes:
                    # Its predecessor died under a cap of its own, which ends with it.
                    self.apply_limit(worker, None)
        except OSError as exc:
            log.warning("worker %s runs outside its cgroup: %s", worker.name, exc)

    def apply_limit(self, worker: PooledWorker, limit_bytes: int | None) -> None:
        """The cap that the next task asked for; None for the plan's."""
        group = worker.cgroup
        if group is None:
            return
        limit = self._limit_bytes if limit_bytes is None else limit_bytes
        try:
            group.set_limit(limit)
            self._limits[worker.name] = limit
        except OSError as exc:
            log.warning("the limit of worker %s could not be set: %s", worker.name, exc)

    def reading(self, worker: PooledWorker, *, always: bool) -> CgroupReading | None:
        """What the worker's group tells now; None when it has none.

        A SHORT task that simply succeeded is not worth the reading, unless `always`.
        """
        group = worker.cgroup
        if group is None or not (always or worker.schedule == "LONG"):
            return None
        try:
            after, peak = group.oom_kills(), group.peak_bytes()
        except OSError:
            return None
        before = self._oom_kills.get(worker.name, 0)
        self._oom_kills[worker.name] = after
        if not group.reset_peak():
            peak = None if after == before else peak  # it may be an earlier task's
        limit = self._limits.get(worker.name)
        noted = max(before, self._looks[worker.name][0])
        return CgroupReading(worker.name, before, after, peak, limit, group.directory, noted)

    def look(self, workers: Iterable[PooledWorker], machine_oom_kills: int | None) -> None:
        """Note what the workers' groups have counted so far.

        Reads one file, not one for each, unless the kernel has killed somewhere on the machine
        since the last look but one.
        """
        before, last = self._machine_looks
        self._machine_looks = (last, machine_oom_kills)
        if machine_oom_kills is not None and before == last == machine_oom_kills:
            return
        for worker in workers:
            if worker.cgroup is not None:
                _, last_kills = self._looks[worker.name]
                self._looks[worker.name] = (last_kills, worker.cgroup.oom_kills())

    def close(self) -> None:
        """Remove every group; one that something still lives in stays."""
        for name, group in self._groups.items():
            if not group.remove():
                log.info("the cgroup of worker %s stays: somebody is in it", name)
        self._groups.clear()

    def _make(self, name: str, create: CgroupFactory) -> Cgroup | None:
        group = create(name, self._limit_bytes)
        if group is not None:
            self._groups[name] = group
            self._limits[name] = self._limit_bytes
            self._oom_kills[name] = group.oom_kills()
        return group
