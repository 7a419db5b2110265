# SPDX-License-Identifier: Apache-2.0
"""The effective limits of this process on CPU, memory and processes, and their sources.

The smallest of: the machine, the control group and every group above it (v1 or v2), the CPU
affinity, `RLIMIT_NPROC`. `psutil.virtual_memory()` and `os.cpu_count()` alone are wrong inside a
container. This module keeps nothing in reserve; the plan does that.

`read_limits` is a pure function of the files below `root`, so that tests use trees of files.
Without `/proc` (macOS) the machine's own figures are returned.

The kernel counts threads as processes, in every control group with a `pids.max` and, for anybody
but root, per user (`RLIMIT_NPROC`). A fork beyond that is refused with EAGAIN, which Python shows
as `BlockingIOError: Resource temporarily unavailable`: `no_room_text` says which limit it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ..process import macos
from .cgroup_tree import (
    LIMIT_FILES_V1,
    LIMIT_FILES_V2,
    UNLIMITED_BYTES,
    V1,
    Location,
    left_in_groups,
    level_number,
    machine_memory_bytes,
    read_text,
    visible_groups,
)

NO_ROOM = "there is no room for another process"
HINT = (
    "end what is not needed (openenv status, openenv down NAME), ask for fewer --replicas or "
    "--shards, or raise that limit"
)
_NO_THREADS = ("can't start new thread", "unable to start watchdog thread")  # CPython's words
_MAKERS = ("fork", "spawn", "_fork_exec")


@dataclass(frozen=True)
class Limits:
    """The limits; `sources` says for each of the three where it was found."""

    cpus: float
    memory_bytes: int
    pids: int | None  # None: no bound is known
    sources: dict[str, str] = field(default_factory=dict)
    machine_memory_bytes: int = 0


class _Found(NamedTuple):
    value: float
    source: str


_value = attrgetter("value")


def read_limits(root: str = "", *, affinity: int | None = None) -> Limits:
    """Read the effective limits; `affinity` overrides the number of CPUs that may be used."""
    machine_cpus = os.cpu_count() or 1
    if root and (text := read_text(f"{root}/proc/cpuinfo")):
        listed = sum(line.startswith("processor") for line in text.splitlines())
        machine_cpus = listed or machine_cpus
    if affinity is None:
        affinity = machine_cpus
        if not root and hasattr(os, "sched_getaffinity"):
            affinity = len(os.sched_getaffinity(0))
    memory = _machine_memory_bytes(root, "MemTotal")
    # Among equal ones, the first.
    machine, allowed = _Found(machine_cpus, "machine"), _Found(affinity, "sched_getaffinity")
    cpus = min(machine, allowed, *_cpu_quotas(root), key=_value)
    least = min([_Found(memory, "machine"), *_memory_limits(root)], key=_value)
    pids = min(_pids_limits(root), key=_value, default=None)
    sources = {"cpus": cpus.source, "memory_bytes": least.source}
    if pids is not None:
        sources["pids"] = pids.source
    return Limits(
        cpus=cpus.value,
        memory_bytes=int(least.value),
        pids=None if pids is None else int(pids.value),
        sources=sources,
        machine_memory_bytes=memory,
    )


def available_memory_bytes(root: str = "") -> int:
    """Return the bytes that are still free in the machine and in every group with a limit.

    The page cache counts as available, because the kernel drops it before it kills.
    """
    left = left_in_groups(visible_groups("memory", root, outside_ours=True))
    return min([_machine_memory_bytes(root, "MemAvailable"), *left])


def _machine_memory_bytes(root: str, key: str) -> int:
    if (found := machine_memory_bytes(key, root)) is not None:
        return found
    total, available = macos.machine_memory_bytes()
    return total if key == "MemTotal" else available


def _cpu_quotas(root: str) -> Iterator[_Found]:
    for level in visible_groups("cpu", root):
        if level.version == V1:
            name, quota = "cpu.cfs_quota_us", level_number(level, "cpu.cfs_quota_us")
            period = level_number(level, "cpu.cfs_period_us")
        else:
            fields = (read_text(f"{level.directory}/cpu.max") or "max").split()
            name, quota = "cpu.max", None if fields[0] == "max" else int(fields[0])
            period = int(fields[1]) if len(fields) > 1 else 100_000
        if quota is not None and quota > 0 and period:
            yield _Found(quota / period, _level_source(level, name))


def _memory_limits(root: str) -> Iterator[_Found]:
    # The cap of a worker's group is our own, not a limit of the system.
    for level in visible_groups("memory", root, outside_ours=True):
        for name in LIMIT_FILES_V1 if level.version == V1 else LIMIT_FILES_V2:
            value = level_number(level, name)
            if value is not None and 0 < value < UNLIMITED_BYTES:
                yield _Found(value, _level_source(level, name))


def _pids_limits(root: str) -> Iterator[_Found]:
    for level in visible_groups("pids", root):
        if (value := level_number(level, "pids.max")) is not None:
            yield _Found(value, _level_source(level, "pids.max"))
    if not root and (own_limit := _own_process_limit()) is not None:
        yield _Found(own_limit, "RLIMIT_NPROC")


def _own_process_limit() -> int | None:
    """Return the limit on this user's threads, which the kernel does not apply to root."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def _level_source(level: Location, name: str) -> str:
    return f"cgroup v{level.version} {name} at {level.path}"


@dataclass(frozen=True, slots=True)
class ProcessRoom:
    """One limit on processes and threads, and how much of it is used."""

    limit: int
    used: int
    source: str

    @property
    def left(self) -> int:
        """Return how many more processes and threads the limit allows."""
        return max(0, self.limit - self.used)

    def sentence(self) -> str:
        """A text: `60 of 64 processes and threads are in use (cgroup v1 pids.max at /a)`."""
        return f"{self.used} of {self.limit} processes and threads are in use ({self.source})"


def process_room(root: str = "") -> ProcessRoom | None:
    """Return the limit that leaves the fewest processes; None if there is none."""
    return min(_rooms(root), key=lambda room: room.left, default=None)


def no_room_text() -> str:
    """Return the message for a refused fork."""
    room = process_room()
    return NO_ROOM if room is None else f"{NO_ROOM}: {room.sentence()}"


def why_not_started(exc: OSError) -> str:
    """Return one clause on why a process could not be started."""
    if exc.errno == errno.EAGAIN:
        return no_room_text()
    return f"{exc.strerror or exc} ({type(exc).__name__})"


def tells_no_room(text: str) -> bool:
    """Return whether a program's last log lines say that it was refused a process or a thread."""
    refused = os.strerror(errno.EAGAIN)
    return any(sign in text for sign in (NO_ROOM, refused, *_NO_THREADS))


def is_no_room(exc: BaseException) -> bool:
    """Return whether this was raised because a process or a thread was refused."""
    if isinstance(exc, RuntimeError):
        return str(exc) in _NO_THREADS
    # A socket that would block raises the same error, so call this only for errors of forks.
    traceback = exc.__traceback__ if isinstance(exc, BlockingIOError) else None
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    names = traceback.tb_frame.f_code.co_names if traceback is not None else ()
    return any(maker in name for name in names for maker in _MAKERS)


def _rooms(root: str) -> Iterator[ProcessRoom]:
    for level in visible_groups("pids", root):
        limit, used = level_number(level, "pids.max"), level_number(level, "pids.current")
        if limit is not None and used is not None:
            yield ProcessRoom(limit, used, _level_source(level, "pids.max"))
    limit = None if root else _own_process_limit()
    if limit is not None:
        user, threads = os.geteuid(), 0  # of the user, in all visible processes
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if folder.stat().st_uid == user:
                    threads += len(os.listdir(folder / "task"))  # noqa: PTH208
        yield ProcessRoom(limit, threads, f"RLIMIT_NPROC of user {user}")
