# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has killed for memory in the cgroup that all processes of the server share.

The shim says how each process ended, with the evidence, a moment after its clients and the log
have been told: this is what they are told.
"""

from __future__ import annotations

from ...system.cgroup_tree import TOP, V1, Location, level_number, locate, read_keyed
from ...system.units import MB


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
        self._seen = self._kills()

    def new_kills(self) -> str | None:
        """Return a clause for people; None when none was killed since the last call."""
        kills, before = self._kills(), self._seen
        self._seen = kills
        if kills is None or before is None or kills <= before:
            return None
        limit = self._limit_bytes()
        of = "" if limit is None else f" of {limit / MB:.0f} MB"
        return f"when the kernel killed for memory: its server had reached the limit{of}"

    def _kills(self) -> int | None:
        if self._location is None:
            return None
        name = "memory.oom_control" if self._location.version == V1 else "memory.events"
        return read_keyed(f"{self._location.directory}/{name}", "oom_kill")

    def _limit_bytes(self) -> int | None:
        assert self._location is not None
        name = "memory.limit_in_bytes" if self._location.version == V1 else "memory.max"
        limits = [level_number(level, name) for level in self._location.levels()]
        return min((limit for limit in limits if limit is not None), default=None)
