# SPDX-License-Identifier: Apache-2.0
"""Plans how many workers there may be, are started, and are recycled. Pure.

    memory   ├─ reserve ─┼─ daemon ─┼──────────────────── budget ─────────────────────┤
                                    ├ guaranteed SHORT ┼ guaranteed LONG ┼── burst ───┤

*Guaranteed* workers have their expected memory set aside, so a burst never starves them; they are
forked when they are needed, and one of each schedule stays from then on. *Burst* workers come when
there is work beyond the guaranteed ones. A worker that was idle for a while exits. LONG and SHORT
have a share each, so LONG requests never take the workers of SHORT ones.

Here the number of burst workers is bounded as if each needed almost no memory; at run time
`memory.py` bounds them by the memory that their tasks are expected to need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...system.process.backoff import backoff_seconds
from ...system.text.units import MB
from ..errors import PlanError
from ..messages import LONG, SHORT

if TYPE_CHECKING:
    from ...system.memory.limits import Limits

# The reserve is a tenth of a machine, which the system and its user need as well, or half of that
# in a group of our own. Its minimum leaves room for a page cache; its maximum keeps it from wasting
# the memory of a large machine.
MACHINE_RESERVE_SHARE = 0.10
GROUP_RESERVE_SHARE = 0.05
MIN_RESERVE_BYTES = 32 * MB
MAX_RESERVE_BYTES = 1024 * MB

# What guaranteed workers may set aside of the budget, and how a burst divides the rest.
SHORT_SHARE = 0.25
LONG_SHARE = 0.50
BURST_SHORT_SHARE = 0.25

BURST_SHORT_PER_CPU = 8  # SHORT tasks mostly compute: more than this only makes them all slower
BURST_LONG_PER_CPU = 64  # LONG ones mostly wait; a hundred that compile would freeze a laptop
MIN_TASK_BYTES = 8 * MB  # what any task is expected to need at least
MAX_WORKERS = 1024  # per schedule; beyond it file descriptors and not memory are the limit
PIDS_PER_WORKER = 4  # a worker and what an operation commonly starts (uv, git, a compiler)
PIDS_SHARE = 0.5  # of the pids limit, the rest is for replicas and the user


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of workers of each schedule, and the memory they share. Sizes in bytes."""

    guaranteed_long: int
    guaranteed_short: int
    burst_long: int  # most beyond the guaranteed ones
    burst_short: int
    budget_bytes: int  # what all workers together may use
    reserve_bytes: int  # left to everything else
    worker_bytes: int | None = None  # cap of one worker; None: no cap
    long_bytes: int = 0  # expected of one LONG worker
    short_bytes: int = 0

    def guaranteed(self, schedule: str) -> int:
        """Return how many workers of `schedule` are guaranteed."""
        return self.guaranteed_long if schedule == LONG else self.guaranteed_short

    def capacity(self, schedule: str) -> int:
        """Return how many workers of `schedule` may exist at once."""
        burst = self.burst_long if schedule == LONG else self.burst_short
        return self.guaranteed(schedule) + burst

    def share_bytes(self, schedule: str) -> int:
        """Return the bytes set aside for one guaranteed worker of `schedule`."""
        return self.long_bytes if schedule == LONG else self.short_bytes

    @property
    def burst_bytes(self) -> int:
        """Return the bytes of the budget that guaranteed workers' shares leave."""
        shares = self.guaranteed_long * self.long_bytes + self.guaranteed_short * self.short_bytes
        return max(0, self.budget_bytes - shares)


def plan_workers(
    limits: Limits,
    *,
    daemon_bytes: int,
    expected: Mapping[str, int],
    max_long: int = 0,
    max_short: int = 0,
    worker_memory_bytes: int = 0,
    reserve_bytes: int = 0,
) -> Plan:
    """Make the plan for this machine; a setting of 0 leaves the choice to the plan.

    `daemon_bytes` is what the daemon and the zygote themselves use, `expected` the expected
    memory of one worker by schedule.

    Raises `PlanError`: when one LONG and one SHORT worker do not fit.
    """
    long_bytes, short_bytes = max(1, expected[LONG]), max(1, expected[SHORT])
    in_group = limits.memory_bytes < limits.machine_memory_bytes
    share = int(limits.memory_bytes * (GROUP_RESERVE_SHARE if in_group else MACHINE_RESERVE_SHARE))
    reserve = reserve_bytes or min(MAX_RESERVE_BYTES, max(MIN_RESERVE_BYTES, share))
    budget = limits.memory_bytes - reserve - daemon_bytes
    _check_floor(limits.memory_bytes, reserve, daemon_bytes, long_bytes + short_bytes, budget)

    most_long, most_short = _most_workers(limits, max_long, max_short)
    cores = max(1, math.ceil(limits.cpus))
    guaranteed_short = _fitting(budget * SHORT_SHARE, short_bytes, min(cores, most_short))
    guaranteed_long = _fitting(budget * LONG_SHARE, long_bytes, min(cores, most_long))

    rest = max(0, budget - guaranteed_long * long_bytes - guaranteed_short * short_bytes)
    burst_short = min(
        int(rest * BURST_SHORT_SHARE / short_bytes),
        most_short - guaranteed_short,
        BURST_SHORT_PER_CPU * cores,
    )
    rest -= burst_short * short_bytes
    least_long = min(long_bytes, MIN_TASK_BYTES)
    return Plan(
        guaranteed_long=guaranteed_long,
        guaranteed_short=guaranteed_short,
        burst_long=min(rest // least_long, most_long - guaranteed_long, BURST_LONG_PER_CPU * cores),
        burst_short=burst_short,
        budget_bytes=budget,
        reserve_bytes=reserve,
        # By default half of the budget, so that no worker takes all of it.
        worker_bytes=worker_memory_bytes or min(budget, max(2 * long_bytes, budget // 2)),
        long_bytes=long_bytes,
        short_bytes=short_bytes,
    )


def _check_floor(memory: int, reserve: int, daemon: int, needed: int, budget: int) -> None:
    if budget >= needed:
        return
    raise PlanError(
        f"{_mb(memory)} of memory are too few: the daemon needs {_mb(daemon)}, {_mb(reserve)} stay "
        f"in reserve, and one long and one short worker need {_mb(needed)}.",
        f"Give it {_mb(reserve + daemon + needed)} or more, or lower OPENENV_RESERVE_MB.",
    )


def _most_workers(limits: Limits, max_long: int, max_short: int) -> tuple[int, int]:
    """Return the most workers of each schedule that settings and the pids limit allow."""
    by_pids = MAX_WORKERS
    if limits.pids is not None:
        by_pids = max(2, int(limits.pids * PIDS_SHARE / PIDS_PER_WORKER))
    most_short = min(max_short or MAX_WORKERS, MAX_WORKERS, max(1, by_pids // 2))
    most_long = min(max_long or MAX_WORKERS, MAX_WORKERS, max(1, by_pids - most_short))
    return most_long, most_short


def _fitting(share_bytes: float, each_bytes: int, most: int) -> int:
    """Return how many of `each_bytes` fit into the share: at least one, at most `most`."""
    return max(1, min(most, int(share_bytes / each_bytes)))


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / MB:,.0f} MB"


# How many workers of a schedule stay idle once it has had a task. The other guaranteed ones are not
# forked yet, and only their memory is set aside: a fork takes 2 ms, and an idle worker would hold
# some MB.
KEPT_WORKERS = 1

# What a worker may have grown by since it was forked (leaks, caches, fragmentation).
MAX_GROWTH_BYTES = 96 * MB

# SHORT workers are forked one after another: those that exist mostly clear the queue before the
# next one is up, and a flood of tiny tasks must not fork a process for each.
MAX_SHORT_FORKS_AT_ONCE = 1
MAX_LONG_FORKS_AT_ONCE = 16

_FIRST_BACK_OFF_SECONDS = 0.05
_MAX_BACK_OFF_SECONDS = 5.0

# After this many failed starts in a row, waiting tasks fail rather than hang.
MAX_FAILED_STARTS = 6
# The preload may be what kills the zygote: after this many failures, workers start without it.
FAILED_STARTS_BEFORE_BARE = 3


def workers_wanted(
    *,
    schedule: str,
    kept: int,
    capacity: int,
    living: int,
    leaving: int,
    idle: int,
    waiting: int,
    requested: int,
) -> int:
    """Decide how many workers of a schedule to request now.

    One of the kept workers is replaced once it is gone, any other only when a task waits. Those
    that are `living` take tasks, the `idle` among them have none; `waiting` counts tasks.
    """
    below_kept = kept - living - leaving - requested
    for_work = waiting - idle - requested
    if schedule == SHORT and living > 0:
        for_work = min(for_work, MAX_SHORT_FORKS_AT_ONCE - requested)
    most_now = MAX_LONG_FORKS_AT_ONCE - requested
    return max(0, min(max(below_kept, for_work), capacity - living - requested, most_now))


def reason_to_recycle(*, grown_bytes: int | None) -> str | None:
    """Return why a worker that has finished its task must leave; None when it may stay."""
    if grown_bytes is not None and grown_bytes > MAX_GROWTH_BYTES:
        return f"it had grown by {grown_bytes / MB:.0f} MB"
    return None


def back_off_seconds(failures: int) -> float:
    """Return how long to wait before the next start, after some that failed in a row."""
    return backoff_seconds(failures, first=_FIRST_BACK_OFF_SECONDS, longest=_MAX_BACK_OFF_SECONDS)
