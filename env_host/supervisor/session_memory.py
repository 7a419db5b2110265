# SPDX-License-Identifier: Apache-2.0
"""The memory that isolated sessions hold.

An isolated session is held to its cap by a cgroup below the replica's own, where there can be one;
elsewhere by a watchdog.

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

from ...system.memory.cgroups import Cgroup, GroupsBelow
from ...system.process.proc import rollup_bytes
from ...system.text.units import MB
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
            # A page that n processes share counts as 1/n.
            if _is_uncapped(each) and (rollup_bytes(each.pid, "Pss") or 0) > self._limit:
                each.killed_for = cap_sentence(self._limit)
                os.kill(each.pid, signal.SIGKILL)


def private_bytes(pid: int) -> int:
    """Return what would be free again if the process exited: the pages it shares with no other."""
    return rollup_bytes(pid, "Private_Clean", "Private_Dirty") or 0


def cap_sentence(limit_bytes: int) -> str:
    """Say how a session ended that went over its cap."""
    return f"was killed for memory: it needed more than {limit_bytes / MB:g} MB (--session-memory)"


def _is_uncapped(child: Child) -> bool:
    return child.is_isolated and child.group is None


def _remove_abandoned(directory: str) -> None:
    """Remove the cgroups that killed supervisors have left, where no shim does."""
    for name in os.listdir(directory):  # noqa: PTH208
        match = _SESSION.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):  # noqa: PTH110
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")  # noqa: PTH106
