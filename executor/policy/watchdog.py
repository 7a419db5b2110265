# SPDX-License-Identifier: Apache-2.0
"""Memory caps for workers that have no cgroup, which a watchdog enforces ten times a second.

Without a cap, a worker that grows takes the machine's memory until the kernel kills a process of
its own choice. So a worker over its cap is killed; and when the machine is nearly out of memory,
the worker that holds the most. `find_violation` decides, `supervisor/memory.py` reads and kills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...system.text.units import MB

# Below this share of the reserve, what is left is what the kernel itself begins to need.
_DANGER_SHARE = 0.25
_LEAST_WORTH_KILLING_BYTES = 32 * MB  # to kill a smaller worker frees too little


@dataclass(frozen=True, slots=True)
class Usage:
    """What one worker's tree holds. Sizes in bytes."""

    name: str
    held_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class LimitViolation:
    """A worker that is to be killed, and the evidence. Sizes in bytes."""

    name: str
    held_bytes: int
    limit_bytes: int | None
    evidence: str


def find_violation(
    usages: Sequence[Usage], *, available_bytes: int, reserve_bytes: int
) -> LimitViolation | None:
    """Choose the worker to kill now, the largest first; None when all is well."""
    over = [u for u in usages if u.limit_bytes is not None and u.held_bytes > u.limit_bytes]
    if over:
        worst = max(over, key=lambda usage: usage.held_bytes)
        return LimitViolation(
            worst.name, worst.held_bytes, worst.limit_bytes, "openenvd's watchdog: over its limit"
        )
    if available_bytes >= reserve_bytes * _DANGER_SHARE or not usages:
        return None
    largest = max(usages, key=lambda usage: usage.held_bytes)
    if largest.held_bytes < _LEAST_WORTH_KILLING_BYTES:
        return None
    left = f"{available_bytes / MB:.0f} MB were left on the machine, and it held the most"
    return LimitViolation(largest.name, largest.held_bytes, None, f"openenvd's watchdog: {left}")
