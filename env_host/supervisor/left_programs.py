# SPDX-License-Identifier: Apache-2.0
"""Programs that sessions have left behind in a replica, and that hold memory.

A session of a shard starts what it likes, and need not end it. While there are sessions, nothing
says whose a program is; when there are none, whatever is in the replica's cgroup and was not there
before the first of them is what they have left. Without a cgroup that is the replica's alone, only
what is still below its processes is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ...system.cgroups import Cgroup
from ...system.proc import descendants_of, read_stat
from ...system.units import MB
from .session_memory import private_bytes

MIN_BYTES = 16 * MB  # that a program holds, to be named
MAX_NAMED = 5


class LeftPrograms:
    """Looks for programs that sessions have left behind."""

    def __init__(self, group: Cgroup | None) -> None:
        self._group = group
        self._known: set[int] = set()

    def note_known(self) -> None:
        """Take what runs before the first session for the environment's own."""
        self._known = self._running() | _ancestors()

    def look(self, own_pids: Iterable[int]) -> list[dict[str, Any]]:
        """Return what runs beside these processes, the largest first: pid, name and bytes."""
        found: list[dict[str, Any]] = []
        for pid in self._running() - self._known - {os.getpid(), *own_pids}:
            size, stat = private_bytes(pid), read_stat(pid)
            if size >= MIN_BYTES and stat is not None:
                found.append({"pid": pid, "name": stat.name, "bytes": round(size / MB) * MB})
        return sorted(found, key=lambda one: -one["bytes"])[:MAX_NAMED]

    def _running(self) -> set[int]:
        below = descendants_of(os.getpid())
        return below if self._group is None else below | set(self._group.pids())


def _ancestors() -> set[int]:
    found: set[int] = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        stat = read_stat(pid)
        pid = 0 if stat is None else stat.parent
    return found
