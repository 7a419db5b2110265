# SPDX-License-Identifier: Apache-2.0
"""CPU, memory and process counts that this process may really use, and where that was found.

The smallest of: the machine, the control group and every group above it (v1 or v2), the CPU
affinity, `RLIMIT_NPROC`. `psutil.virtual_memory()` and `os.cpu_count()` alone are wrong inside a
container. Nothing is kept in reserve here: that is the plan's business.

`read_limits` is a pure function of the files below `root`, so that tests hand it trees of files.
Where there is no `/proc` (macOS) the machine's own figures remain.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..process import macos
from .cgroup_tree import (
    LIMIT_FILES_V1,
    LIMIT_FILES_V2,
    UNLIMITED_BYTES,
    V1,
    Location,
    left_in_groups,
    level_number,
    locate,
    machine_memory_bytes,
    read_text,
)


@dataclass(frozen=True)
class Limits:
    """What may be used; `sources` says for each of the three where it was found."""

    cpus: float
    memory_bytes: int
    pids: int | None  # None: no bound is known
    sources: dict[str, str] = field(default_factory=dict)
    machine_cpus: int = 0
    machine_memory_bytes: int = 0


@dataclass(frozen=True)
class _Found:
    value: float
    source: str


def read_limits(root: Path = Path("/"), *, affinity: int | None = None) -> Limits:
    """Read the limits in force.

    `affinity` (how many CPUs the process may run on) overrides what the system says.
    """
    prefix = "" if root == Path("/") else str(root)
    machine_cpus = _machine_cpus(prefix)
    memory = _machine_memory_bytes(prefix, "MemTotal")
    cpus = _smallest(
        _Found(machine_cpus, "machine"), _affinity(prefix, affinity), *_cpu_quotas(prefix)
    )
    least = _smallest(_Found(memory, "machine"), *_memory_limits(prefix))
    pids = min(_pids_limits(prefix), key=lambda found: found.value, default=None)
    sources = {"cpus": cpus.source, "memory_bytes": least.source}
    if pids is not None:
        sources["pids"] = pids.source
    return Limits(
        cpus=cpus.value,
        memory_bytes=int(least.value),
        pids=None if pids is None else int(pids.value),
        sources=sources,
        machine_cpus=machine_cpus,
        machine_memory_bytes=memory,
    )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that are still free: of the machine, and of every group with a limit.

    Files in the page cache count as available: the kernel gives them up before it kills.
    """
    prefix = "" if root == Path("/") else str(root)
    own = locate("memory", prefix)
    levels = own.outside_ours().levels() if own is not None else []
    return min([_machine_memory_bytes(prefix, "MemAvailable"), *left_in_groups(levels)])


def _machine_memory_bytes(prefix: str, key: str) -> int:
    """The machine's `MemTotal` or `MemAvailable`."""
    if (found := machine_memory_bytes(key, prefix)) is not None:
        return found
    total, available = macos.machine_memory_bytes()
    return total if key == "MemTotal" else available


def _smallest(first: _Found, *others: _Found | None) -> _Found:
    """The smallest; among equals the one named first."""
    return min([first, *(o for o in others if o is not None)], key=lambda found: found.value)


def _machine_cpus(prefix: str) -> int:
    if prefix and (text := read_text(f"{prefix}/proc/cpuinfo")):
        listed = sum(line.startswith("processor") for line in text.splitlines())
        if listed:
            return listed
    return os.cpu_count() or 1


def _affinity(prefix: str, affinity: int | None) -> _Found | None:
    if affinity is not None:
        return _Found(affinity, "sched_getaffinity")
    if prefix or not hasattr(os, "sched_getaffinity"):
        return None
    return _Found(len(os.sched_getaffinity(0)), "sched_getaffinity")


def _cpu_quotas(prefix: str) -> Iterator[_Found]:
    own = locate("cpu", prefix)
    for level in own.levels() if own is not None else ():
        if (cpus := _quota(level)) is not None:
            name = "cpu.cfs_quota_us" if level.version == V1 else "cpu.max"
            yield _Found(cpus, level_source(level, name))


def _quota(level: Location) -> float | None:
    if level.version == V1:
        quota = level_number(level, "cpu.cfs_quota_us")
        period = level_number(level, "cpu.cfs_period_us")
    else:
        fields = (read_text(f"{level.directory}/cpu.max") or "max").split()
        quota = None if fields[0] == "max" else int(fields[0])
        period = int(fields[1]) if len(fields) > 1 else 100_000
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period


def _memory_limits(prefix: str) -> Iterator[_Found]:
    own = locate("memory", prefix)
    # A worker stands in a group whose cap is our own doing, and no limit of the system's.
    for level in own.outside_ours().levels() if own is not None else ():
        for name in LIMIT_FILES_V1 if level.version == V1 else LIMIT_FILES_V2:
            value = level_number(level, name)
            if value is not None and 0 < value < UNLIMITED_BYTES:
                yield _Found(value, level_source(level, name))


def _pids_limits(prefix: str) -> Iterator[_Found]:
    own = locate("pids", prefix)
    for level in own.levels() if own is not None else ():
        if (value := level_number(level, "pids.max")) is not None:
            yield _Found(value, level_source(level, "pids.max"))
    if not prefix and (own_limit := own_process_limit()) is not None:
        yield _Found(own_limit, "RLIMIT_NPROC")


def own_process_limit() -> int | None:
    """Return how many threads of this user there may be; the kernel does not hold root to it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def level_source(level: Location, name: str) -> str:
    """Return where that number was found, for people."""
    return f"cgroup v{level.version} {name} at {level.path}"
