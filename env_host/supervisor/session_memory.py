# SPDX-License-Identifier: Apache-2.0
"""What one isolated session holds, and what to say when it was too much."""

from __future__ import annotations

from collections.abc import Iterable

from ...system.proc import rollup_bytes
from ...system.units import MB


def held_bytes(pid: int) -> int:
    """The process's share of memory (PSS): pages of several processes count by their part."""
    return rollup_bytes(pid, "Pss") or 0


def own_bytes(pid: int) -> int:
    """What would be free again if the process ended: the pages that it shares with nobody."""
    return rollup_bytes(pid, "Private_Clean", "Private_Dirty") or 0


def mean_own_bytes(pids: Iterable[int]) -> int | None:
    """Of those that live, in whole megabytes; None when none of them can be looked at."""
    found = [held for pid in pids if (held := own_bytes(pid))]
    return round(sum(found) / len(found) / MB) * MB if found else None


def cap_sentence(limit_bytes: int | None) -> str:
    """How a session ended that went over its cap."""
    cap = "its cap" if limit_bytes is None else f"{limit_bytes / MB:g} MB"
    return f"was killed for memory: it needed more than {cap} (--session-memory)"
