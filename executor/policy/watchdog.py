# SPDX-License-Identifier: Apache-2.0
"""Memory caps for workers that have no cgroup, which a watchdog enforces ten times a second.

Without a cap, a worker that grows takes the machine's memory until the kernel kills a process of
its own choice. So a worker over its cap is killed; and when the machine is nearly out of memory,
the worker that holds the most. `find_violation` decides, `supervisor/memory.py` reads and kills.

The executor's time-outs and intervals, in one value that tests replace.
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


@dataclass(frozen=True, slots=True)
class Timing:
    """The executor's waits, all in seconds.

    Attributes:
        burst_idle: a worker that is not kept exits after so long without a task, so that memory
            falls back after a burst.
        leave: a worker that has no task and was asked to exit is killed after it.
        exit_status: between a worker's exit and the report of its reaper.
        source_silence: a zygote that owes an answer for so long hangs or is stopped, and is
            replaced. Far more than a preload takes on a busy machine.
        source_exit: a zygote that was asked to exit is killed after it.
        watchdog: between looks at busy workers that have no cgroup.
        cgroup_look: between looks at the counters of busy workers' cgroups.
    """

    burst_idle: float = 10.0
    leave: float = 1.0
    exit_status: float = 1.0
    source_silence: float = 30.0
    source_exit: float = 2.0
    watchdog: float = 0.1
    cgroup_look: float = 1.0
