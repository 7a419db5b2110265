# SPDX-License-Identifier: Apache-2.0
"""What one isolated session holds, and what to say when it was too much."""

from __future__ import annotations

from collections.abc import Iterable

_MEGABYTE = 2**20


def held_bytes(pid: int) -> int:
    """The process's share of memory (PSS): pages of several processes count by their part."""
    return _sum_of(pid, ("Pss:",))


def own_bytes(pid: int) -> int:
    """What would be free again if the process ended: the pages that it shares with nobody."""
    return _sum_of(pid, ("Private_Clean:", "Private_Dirty:"))


def mean_own_bytes(pids: Iterable[int]) -> int | None:
    """Of those that live, in whole megabytes; None when none of them can be looked at."""
    found = [held for pid in pids if (held := own_bytes(pid))]
    return round(sum(found) / len(found) / _MEGABYTE) * _MEGABYTE if found else None


def _sum_of(pid: int, names: tuple[str, ...]) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(names)) * 1024


def cap_sentence(limit_bytes: int | None) -> str:
    """How a session ended that went over its cap."""
    cap = "its cap" if limit_bytes is None else f"{limit_bytes / _MEGABYTE:g} MB"
    return f"was killed for memory: it needed more than {cap} (--session-memory)"
