# SPDX-License-Identifier: Apache-2.0
"""Decides by memory which waiting tasks may start and which workers are killed; `Timing`. Pure.

    budget   ├ guaranteed SHORT ┼ guaranteed LONG ┼──────────── burst ────────────┤
    a task takes                  its worker's share, and what it needs beyond ───▶

Two things must allow it: the budget (less what the tasks under way are expected to need) and the
machine (what it would still give, less what those tasks have yet to grow by; environments use
memory that no budget counts). A SHORT task within its guaranteed worker's share is always allowed,
since `openenv down` frees memory.

Order: a task that does not fit lets smaller ones pass, so that memory does not lie idle. Once it
has waited `PATIENCE_SECONDS`, nothing of its schedule passes it any more as long as that brings it
nearer, and when it is alone it starts even if it is expected to need more than the whole burst.

Of workers that have no cgroup, a watchdog enforces the caps ten times a second. Without a cap, a
worker that grows takes the machine's memory until the kernel kills a process of its own choice. So
a worker over its cap is killed; and when the machine is nearly out of memory, the worker that holds
the most. `find_violation` decides, `supervisor/memory.py` reads and kills.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...system.text.units import MB
from ..messages import SHORT

PATIENCE_SECONDS = 10.0
# A task is alone and the machine still has too little for it: the estimate may be too high, so the
# task is tried, unless the estimate would have to be wrong by more than this factor.
LONE_PATIENCE_SECONDS = 30.0
LONE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory that the next tasks of one schedule may take. Sizes in bytes."""

    schedule: str
    burst_bytes: int  # of the budget, beyond the guaranteed workers' shares
    available_bytes: int  # by the machine
    share_bytes: int = 0  # of one guaranteed worker
    guaranteed_free: int = 0  # guaranteed workers without a task
    is_alone: bool = False  # no task of this schedule is under way

    def fits_all(self, count: int, largest_bytes: int) -> bool:
        """Return whether any `count` tasks fit, none of which needs more than `largest_bytes`."""
        return count * largest_bytes <= min(self.burst_bytes, self.available_bytes)


@dataclass(frozen=True, slots=True)
class Need:
    """A task that waits."""

    id: str
    expected_bytes: int
    waiting_since: float  # on a clock that does not step, as is `now` below


@dataclass(frozen=True, slots=True)
class Shortage:
    """The reason why a task does not start."""

    needs_bytes: int
    free_bytes: int

    def sentence(self) -> str:
        """Return the reason that `status` shows."""
        needs, free = self.needs_bytes / MB, self.free_bytes / MB
        return f"waiting for memory: needs {needs:.0f} MB, {free:.0f} MB free"


@dataclass(slots=True)
class AdmissionDecision:
    """The tasks that start, in the order of the queue, and why others do not."""

    chosen: list[str] = field(default_factory=list)
    short: dict[str, Shortage] = field(default_factory=dict)


def admit(needs: Iterable[Need], memory: FreeMemory, *, most: int, now: float) -> AdmissionDecision:
    """Decide which waiting tasks of one schedule start now."""
    admission = AdmissionDecision()
    burst, available = memory.burst_bytes, memory.available_bytes
    guaranteed, alone = memory.guaranteed_free, memory.is_alone
    for need in needs:
        if len(admission.chosen) >= most:
            break
        share = memory.share_bytes if guaranteed > 0 else 0
        beyond = max(0, need.expected_bytes - share)
        within_share = share > 0 and beyond == 0
        waited = now - need.waiting_since
        machine_allows = need.expected_bytes <= available or (
            within_share and memory.schedule == SHORT
        )
        if alone:
            enough = need.expected_bytes * LONE_SHARE <= available
            machine_allows |= enough and waited >= LONE_PATIENCE_SECONDS
        if not need.expected_bytes or (machine_allows and (beyond <= burst or alone)):
            admission.chosen.append(need.id)
            burst -= beyond
            available -= need.expected_bytes
            guaranteed -= 1
            alone = False
            continue
        free = max(0, min(burst + share, available))
        admission.short[need.id] = Shortage(need.expected_bytes, free)
        if waited >= PATIENCE_SECONDS and not alone:
            break
    return admission


# Below this share of the reserve, what is left is what the kernel itself begins to need.
_DANGER_SHARE = 0.25
_MIN_WORTH_KILLING_BYTES = 32 * MB  # to kill a smaller worker frees too little


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory of one worker's process tree. Sizes in bytes."""

    name: str
    held_bytes: int
    limit_bytes: int | None
    evidence: str = ""  # of a worker that must be killed


def find_violation(
    usages: Sequence[Usage], *, available_bytes: int, reserve_bytes: int
) -> Usage | None:
    """Choose the worker to kill now, the largest first; None when all is well."""
    over = [u for u in usages if u.limit_bytes is not None and u.held_bytes > u.limit_bytes]
    if over:
        worst = max(over, key=lambda usage: usage.held_bytes)
        return replace(worst, evidence="openenvd's watchdog: over its limit")
    if available_bytes >= reserve_bytes * _DANGER_SHARE or not usages:
        return None
    largest = max(usages, key=lambda usage: usage.held_bytes)
    if largest.held_bytes < _MIN_WORTH_KILLING_BYTES:
        return None
    left = f"{available_bytes / MB:.0f} MB were left on the machine, and it held the most"
    return replace(largest, limit_bytes=None, evidence=f"openenvd's watchdog: {left}")


@dataclass(frozen=True, slots=True)
class Timing:
    """The executor's waits, all in seconds."""

    # A worker that is not kept exits after so long without a task: memory falls back after a burst.
    burst_idle: float = 10.0
    leave: float = 1.0  # a worker that has no task and was asked to exit is killed after it
    exit_status: float = 1.0  # between a worker's exit and the report of its reaper
    # A zygote that owes an answer for so long hangs or is stopped, and is replaced. Far more than a
    # preload takes on a busy machine.
    source_silence: float = 30.0
    source_exit: float = 2.0  # a zygote that was asked to exit is killed after it
    watchdog: float = 0.1  # between looks at busy workers that have no cgroup
    cgroup_look: float = 1.0  # between looks at the counters of busy workers' cgroups
