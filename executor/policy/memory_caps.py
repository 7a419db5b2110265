# SPDX-License-Identifier: Apache-2.0
"""Caps for workers that have no cgroup: looked at, ten times a second, instead of enforced.

Without a cap of its own, a worker that grows takes the machine's memory until the kernel kills
whom it likes. So whoever exceeds its cap is ended; and when the machine is nearly out of memory,
whoever holds the most. `offence_of` decides, the supervisor acts, and
`processes.resources.memory` reads.

Costs nothing while no such worker has a task, and then some tens of microseconds for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...system.units import MB

WATCH_SECONDS = 0.1

# Below this share of the reserve, what is left is what the kernel itself begins to need.
_DANGER_SHARE = 0.25
_LEAST_WORTH_ENDING_BYTES = 32 * MB  # to end less would help nobody


@dataclass(frozen=True, slots=True)
class Usage:
    """What one worker's tree holds. Sizes in bytes."""

    name: str
    held_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Offence:
    """Who is to be ended, and the evidence."""

    name: str
    held_bytes: int
    limit_bytes: int | None
    evidence: str


def offence_of(
    usages: Sequence[Usage], *, available_bytes: int, reserve_bytes: int
) -> Offence | None:
    """The worker to end now, the largest first; None when all is well."""
    over = [u for u in usages if u.limit_bytes is not None and u.held_bytes > u.limit_bytes]
    if over:
        worst = max(over, key=lambda usage: usage.held_bytes)
        return Offence(
            worst.name, worst.held_bytes, worst.limit_bytes, "openenvd's watchdog: over its limit"
        )
    if available_bytes >= reserve_bytes * _DANGER_SHARE or not usages:
        return None
    largest = max(usages, key=lambda usage: usage.held_bytes)
    if largest.held_bytes < _LEAST_WORTH_ENDING_BYTES:
        return None
    left = f"{available_bytes / MB:.0f} MB were left on the machine, and it held the most"
    return Offence(largest.name, largest.held_bytes, None, f"openenvd's watchdog: {left}")
