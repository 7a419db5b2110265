# SPDX-License-Identifier: Apache-2.0
"""How much more memory processes may use: what the machine has free, what control groups leave.

Files in the page cache count as free: the kernel gives them up before it kills. Every path can be
read below another root, so that tests use trees of files.
"""

from __future__ import annotations

from collections.abc import Iterable

from .cgroup_tree import V1, Location, level_number, locate, read_keyed, read_text

# v1 shows "no limit" as the largest page-aligned number; v2 says `max`.
UNLIMITED_BYTES = 1 << 60
# v2 slows a group down above `memory.high` until it hardly moves: a limit, for planning.
LIMIT_FILES_V2 = ("memory.max", "memory.high")
LIMIT_FILES_V1 = ("memory.limit_in_bytes",)
_CACHE_KEYS_V2 = ("active_file", "inactive_file")
_CACHE_KEYS_V1 = ("total_active_file", "total_inactive_file")


def free_memory_bytes(root: str = "") -> int | None:
    """Return what this process's own groups and the machine leave to it; None: nobody says."""
    own = locate("memory", root)
    left = left_in_groups(own.levels()) if own is not None else []
    found = [machine_memory_bytes("MemAvailable", root), *left]
    return min((each for each in found if each is not None), default=None)


def machine_memory_bytes(key: str, root: str = "") -> int | None:
    """Return the machine's `MemTotal` or `MemAvailable`; None where it does not say."""
    for line in (read_text(f"{root}/proc/meminfo") or "").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def left_in_groups(levels: Iterable[Location]) -> list[int]:
    """Return what each group that has a limit may still use."""
    return [left for level in levels if (left := _left_of(level)) is not None]


def _left_of(level: Location) -> int | None:
    is_v1 = level.version == V1
    limits = [
        value
        for name in (LIMIT_FILES_V1 if is_v1 else LIMIT_FILES_V2)
        if (value := level_number(level, name)) is not None and 0 < value < UNLIMITED_BYTES
    ]
    used = level_number(level, "memory.usage_in_bytes" if is_v1 else "memory.current")
    if not limits or used is None:
        return None
    stat = f"{level.directory}/memory.stat"
    keys = _CACHE_KEYS_V1 if is_v1 else _CACHE_KEYS_V2
    cached = sum(read_keyed(stat, key) or 0 for key in keys)
    return max(0, min(limits) - used + cached)
