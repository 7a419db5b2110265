# SPDX-License-Identifier: Apache-2.0
"""Policy: plain values in, a number or a reason out. Effects happen where it is asked.

How many workers to fork is `workers_wanted`, whether one may stay is `reason_to_recycle`. Whether
memory suffices for a task is `admission.py`.
"""

from __future__ import annotations

from ...system.backoff import backoff_seconds
from ...system.units import MB
from ..messages import SHORT

# How many workers of a schedule stay when there is nothing to do, once it has had something to do.
# The other guaranteed ones are places whose memory is set aside: a fork fills one in 2 ms, and idle
# it would hold some MB.
KEPT_WORKERS = 1

# A worker beyond those that had nothing to do for so long leaves: memory falls back after a burst.
BURST_IDLE_SECONDS = 10.0

# What a worker may have grown by since it was forked (leaks, caches, fragmentation).
MOST_GROWTH_BYTES = 96 * MB

# SHORT workers are forked one after another: those that exist mostly clear the queue before the
# next one is up, and a flood of tiny tasks must not fork a process for each.
MOST_SHORT_FORKS_AT_ONCE = 1
MOST_LONG_FORKS_AT_ONCE = 16

_FIRST_BACK_OFF_SECONDS = 0.05
_MOST_BACK_OFF_SECONDS = 5.0

# After so many starts in vain, waiting tasks are told rather than left to hang.
MOST_FAILED_STARTS = 6
# The preload itself may be what kills the zygote: then workers start without it.
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
    asked: int,
) -> int:
    """How many workers to ask for now.

    `living` are those that take tasks, `leaving` those on their way out, `asked` those asked for.
    One of the `kept` is replaced once it is gone, any other only when a task waits.
    """
    below_kept = kept - living - leaving - asked
    for_work = waiting - idle - asked
    if schedule == SHORT and living > 0:
        for_work = min(for_work, MOST_SHORT_FORKS_AT_ONCE - asked)
    most_now = MOST_LONG_FORKS_AT_ONCE - asked
    return max(0, min(max(below_kept, for_work), capacity - living - asked, most_now))


def reason_to_recycle(*, grown_bytes: int | None) -> str | None:
    """Why a worker that has finished its task must leave; None when it may stay."""
    if grown_bytes is not None and grown_bytes > MOST_GROWTH_BYTES:
        return f"it had grown by {grown_bytes / MB:.0f} MB"
    return None


def back_off_seconds(failures: int) -> float:
    """How long to wait before the next start, after so many that failed in a row."""
    return backoff_seconds(failures, first=_FIRST_BACK_OFF_SECONDS, longest=_MOST_BACK_OFF_SECONDS)
