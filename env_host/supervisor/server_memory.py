# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has killed for memory in the cgroup that all processes of the server share.

The shim says how each process ended, with the evidence, a moment after its clients and the log
have been told: this is what they are told. Of what is killed, some are not the server's to reap
(what an environment has started): a kill whose victim has not been seen for a while is forgotten.
"""

from __future__ import annotations

import os
import time
from signal import SIGKILL

from ...system.cgroup_tree import TOP, V1, Location, level_number, locate, read_keyed
from ...system.memory_left import UNLIMITED_BYTES
from ...system.proc import shared_limit_sentence

LOOK_SECONDS = 1.0  # at least, between two looks at the count
DYING_SECONDS = 10.0  # from the count of a kill until its victim is reaped, as in `server_exit.py`


class ServerMemory:
    """Counts what the kernel killed in the server's own cgroup."""

    def __init__(self, location: Location | None = None) -> None:
        """Begin to count.

        Args:
            location: The group; None: that of this process, if it is one that a shim has made.
        """
        if location is None:
            found = locate("memory")
            location = found if found is not None and TOP in found.path.split("/") else None
        self._location = location
        self._counted = self._told = self._kills()  # told: or forgotten
        self._counted_at = self._looked_at = time.monotonic()

    def look(self) -> None:
        """Count now and then while the server lives, to know when something was killed."""
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._count()

    def kill_of(self, wait_status: int) -> str | None:
        """Return `probably for memory…` if this exit may be of a process that was killed for it.

        It is returned once for each kill. Exits but by SIGKILL leave it to the victim's, which may
        come later.
        """
        self._count()
        was_killed = os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == SIGKILL
        if not was_killed or self._counted is None or self._told is None:
            return None
        if self._counted <= self._told:
            return None
        self._told += 1
        limit = self._limit_bytes()
        return "probably for memory" + (f": {shared_limit_sentence(limit)}" if limit else "")

    def _count(self) -> None:
        self._looked_at = now = time.monotonic()
        if now - self._counted_at >= DYING_SECONDS:
            self._told = self._counted
        if (kills := self._kills()) != self._counted:
            self._counted, self._counted_at = kills, now

    def _kills(self) -> int | None:
        if self._location is None:
            return None
        name = "memory.oom_control" if self._location.version == V1 else "memory.events"
        return read_keyed(f"{self._location.directory}/{name}", "oom_kill")

    def _limit_bytes(self) -> int | None:
        """Return the limit of the replica's own group, if it has one; what is around it may."""
        assert self._location is not None
        name = "memory.limit_in_bytes" if self._location.version == V1 else "memory.max"
        limit = level_number(self._location, name)
        return limit if limit is not None and limit < UNLIMITED_BYTES else None
