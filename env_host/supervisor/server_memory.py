# SPDX-License-Identifier: Apache-2.0
"""`KillCount`: the kills for memory that the kernel counts, and whose each of them was.

    counter of a cgroup ──▶ `evidence_of` an exit     the counter before and after it
                       └──▶ `take_others`             kills that no process of ours died of

The kernel counts a kill, sends SIGKILL, and the victim is reaped a moment later. A count that has
moved is left to a process of ours that is dying; when none is, the victim was a program that the
environment had started, whose exit is not the supervisor's to see. Each kill is given away once, so
that a later `kill -9` by hand finds a counter that stands still.

The group is the replica's own below a shim, and that of its container or job elsewhere. Without one
(local replicas on machines without cgroups) the machine's counter is read, which proves nothing of
a single process: a kill is forgotten when its victim has not been seen for a while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from signal import SIGKILL
from typing import Any

from ...system.memory.cgroup_tree import read_keyed
from ...system.memory.cgroups import Cgroup
from ...system.process.proc import is_dying, shared_limit_sentence

POLL_INTERVAL_SECONDS = 1.0  # at least, between two looks at the count
SETTLE_SECONDS = 0.3  # from a count until the signal has certainly been sent
DYING_SECONDS = 10.0  # from the count of a kill until its victim is reaped, as in `server_exit.py`


class KillCount:
    """Counts what the kernel killed in one cgroup, or on the machine when `group` is None.

    `limited` is the group that has the limit, where the processes stand in one below it.
    """

    def __init__(self, group: Cgroup | None, limited: Cgroup | None = None) -> None:
        self.group = group
        self._limited = limited or group
        self._counted = self._explained = self._read()
        self._counted_at = self._looked_at = time.monotonic()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that all processes of the group held together."""
        return None if self._limited is None else self._limited.peak_bytes()

    @property
    def limit_bytes(self) -> int | None:
        """What they may use; None where only groups around theirs have a limit."""
        return None if self._limited is None else self._limited.limit_bytes()

    def due(self, *, is_used: bool) -> float | None:
        """Return when to look next, on the monotonic clock; None: while nothing happens, never."""
        is_settled = self.group is None or self._counted == self._explained
        return self._looked_at + POLL_INTERVAL_SECONDS if is_used or not is_settled else None

    def evidence_of(self, wait_status: int) -> dict[str, Any]:
        """Return the counter before and after an exit; one by SIGKILL takes one of the kills."""
        self._count()
        before, after = self._explained, self._counted
        if before is None or after is None:
            return {}
        if after > before and _was_killed(wait_status):
            self._explained = before + 1
        if self.group is None:
            return {"machine_oom_kills": [before, after]}
        return {"oom_kills": [before, after], "cgroup": self.group.name}

    def take_others(self, own_pids: Iterable[int]) -> int:
        """Return how many kills were of none of these processes; each is returned once."""
        if time.monotonic() < self._looked_at + POLL_INTERVAL_SECONDS:
            return 0
        self._count()
        if self.group is None or self._explained is None or self._counted is None:
            return 0
        if self._counted <= self._explained:
            return 0
        seconds = self._looked_at - self._counted_at
        if seconds < SETTLE_SECONDS or (seconds < DYING_SECONDS and any(map(is_dying, own_pids))):
            return 0
        return self._take_unexplained()

    def take_rest(self) -> int:
        """Return how many kills are unexplained after the last process of the group was reaped."""
        self._count()
        return self._take_unexplained()

    def _take_unexplained(self) -> int:
        others, self._explained = (self._counted or 0) - (self._explained or 0), self._counted
        return others

    def _count(self) -> None:
        self._looked_at = now = time.monotonic()
        if self.group is None and now - self._counted_at >= DYING_SECONDS:
            self._explained = self._counted
        if (kills := self._read()) != self._counted:
            self._counted, self._counted_at = kills, now

    def _read(self) -> int | None:
        if self.group is None:
            return read_keyed("/proc/vmstat", "oom_kill")
        return self.group.counted_kills()


def was_for_memory(evidence: dict[str, Any], wait_status: int) -> bool:
    """Return whether a process was killed, and its cgroup's counter moved."""
    before, after = evidence.get("oom_kills") or (0, 0)
    return bool(before != after and _was_killed(wait_status))


def memory_clause(limit_bytes: int | None) -> str:
    """Say of a process that it was killed for the memory of all processes of the server."""
    why = f": {shared_limit_sentence(limit_bytes)}" if limit_bytes else ""
    return f"probably for memory{why}"


def _was_killed(wait_status: int) -> bool:
    return os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == SIGKILL
