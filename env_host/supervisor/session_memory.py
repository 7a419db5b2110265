# SPDX-License-Identifier: Apache-2.0
"""The memory of isolated sessions: how much each holds, and what holds it to its cap.

A cgroup below the replica's own, where there can be one; elsewhere a watchdog.

    /…/openenvd/replicas-51fe/my_env-0-7f3a            the replica's, made by its shim
    /…/openenvd/replicas-51fe/my_env-0-7f3a/session-5  one session's, made here before it is forked
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable

from ...system.cgroups import Cgroup, GroupsBelow
from ...system.proc import rollup_bytes
from ...system.units import MB
from .children import Child

CHECK_SECONDS = 0.25  # between two checks of uncapped sessions


_SESSION = re.compile(r"session-(\d+)-\d+")


class SessionGroups(GroupsBelow):
    """Makes the cgroups of sessions; opened in the supervisor before its first fork."""

    def __init__(self) -> None:
        super().__init__()
        if self.available:
            _remove_abandoned(self.directory)

    def create_for(self, number: int, limit_bytes: int) -> Cgroup:
        """Make the cgroup of one session; raises `OSError` when it cannot be made."""
        return self.create(f"session-{os.getpid()}-{number}", limit_bytes)


class MemoryWatchdog:
    """Kills isolated sessions that are over their cap and have no cgroup."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._next_check = 0.0

    def due(self, children: Iterable[Child]) -> float | None:
        """Return when to check next, monotonic; None when there is nothing to check."""
        is_wanted = self._limit is not None and any(_is_uncapped(each) for each in children)
        return self._next_check if is_wanted else None

    def check(self, children: Iterable[Child]) -> None:
        """Kill the sessions that are over their cap, when a check is due."""
        now = time.monotonic()
        if self._limit is None or now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        for each in children:
            if _is_uncapped(each) and proportional_bytes(each.pid) > self._limit:
                each.killed_for = cap_sentence(self._limit)
                os.kill(each.pid, signal.SIGKILL)


def proportional_bytes(pid: int) -> int:
    """Return the PSS of a process: a page that n processes share counts as 1/n."""
    return rollup_bytes(pid, "Pss") or 0


def private_bytes(pid: int) -> int:
    """Return what would be free again if the process exited: the pages it shares with no other."""
    return rollup_bytes(pid, "Private_Clean", "Private_Dirty") or 0


def mean_private_bytes(pids: Iterable[int]) -> int | None:
    """Return the mean of live processes, in whole megabytes; None when none can be read."""
    found = [size for pid in pids if (size := private_bytes(pid))]
    return round(sum(found) / len(found) / MB) * MB if found else None


def cap_sentence(limit_bytes: int | None) -> str:
    """Say how a session ended that went over its cap."""
    cap = "its cap" if limit_bytes is None else f"{limit_bytes / MB:g} MB"
    return f"was killed for memory: it needed more than {cap} (--session-memory)"


def _is_uncapped(child: Child) -> bool:
    return child.is_isolated and child.group is None


def _remove_abandoned(directory: str) -> None:
    """Remove the cgroups that killed supervisors have left, where no shim does."""
    for name in os.listdir(directory):  # noqa: PTH208
        match = _SESSION.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):  # noqa: PTH110
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")  # noqa: PTH106
