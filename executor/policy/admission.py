# SPDX-License-Identifier: Apache-2.0
"""Which waiting tasks may start now, by the memory they are expected to need. Pure.

    budget   ├ guaranteed SHORT ┼ guaranteed LONG ┼──────────── burst ────────────┤
    a task takes                  its worker's share, and what it needs beyond ───▶

Two things must allow it: the budget (less what the tasks under way are expected to need) and the
machine (what it would still give, less what those tasks have yet to grow by; environments use
memory that no budget counts). A SHORT task within its guaranteed worker's share is always allowed,
since `openenv down` frees memory.

Order: a task that does not fit lets smaller ones pass, so that memory does not lie idle. Once it
has waited `PATIENCE_SECONDS`, nothing of its schedule passes it any more as long as that brings it
nearer, and when it is alone it starts even if it is expected to need more than the whole burst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...system.text.units import MB
from ..messages import SHORT

PATIENCE_SECONDS = 10.0
# A task is alone and the machine still has too little for it: the estimate may be too high, so the
# task is tried, unless the estimate would have to be wrong by more than this factor.
LONE_PATIENCE_SECONDS = 30.0
LONE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What the next tasks of one schedule may take. Sizes in bytes."""

    schedule: str
    burst_bytes: int  # of the budget, beyond the guaranteed workers' shares
    available_bytes: int  # by the machine
    share_bytes: int = 0  # of one guaranteed worker
    guaranteed_free: int = 0  # guaranteed workers without a task
    is_alone: bool = False  # no task of this schedule is under way

    def fits_all(self, count: int, largest_bytes: int) -> bool:
        """Say whether any `count` tasks fit, none of which needs more than `largest_bytes`."""
        return count * largest_bytes <= min(self.burst_bytes, self.available_bytes)


@dataclass(frozen=True, slots=True)
class Need:
    """A task that waits."""

    id: str
    expected_bytes: int
    waiting_since: float  # on a clock that does not step, as is `now` below


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a task does not start."""

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
        if machine_allows and (beyond <= burst or alone):
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
