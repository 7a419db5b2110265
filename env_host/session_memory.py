# SPDX-License-Identifier: Apache-2.0
"""What one isolated session holds, and what to say when it was too much."""

from __future__ import annotations

_MEGABYTE = 2**20


def held_bytes(pid: int) -> int:
    """The process's share of memory (PSS): pages of several processes count by their part."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    pss = next((line.split()[1] for line in lines if line.startswith("Pss:")), "0")
    return int(pss) * 1024


def cap_sentence(limit_bytes: int | None) -> str:
    """How a session ended that went over its cap."""
    cap = "its cap" if limit_bytes is None else f"{limit_bytes / _MEGABYTE:g} MB"
    return f"was killed for memory: it needed more than {cap} (--session-memory)"
