# SPDX-License-Identifier: Apache-2.0
"""How many workers to start, which to recycle, and how long to back off: pure functions.

Whether memory suffices for a task is decided in `admission.py`.
"""

from __future__ import annotations

from ...system.process.backoff import backoff_seconds
from ...system.text.units import MB
from ..messages import SHORT

# How many workers of a schedule stay when there is nothing to do, once it has had something to do.
# The other guaranteed ones are places whose memory is set aside: a fork fills one in 2 ms, and idle
# it would hold some MB.
KEPT_WORKERS = 1

# What a worker may have grown by since it was forked (leaks, caches, fragmentation).
MOST_GROWTH_BYTES = 96 * MB

# SHORT workers are forked one after another: those that exist mostly clear the queue before the
# next one is up, and a flood of tiny tasks must not fork a process for each.
MOST_SHORT_FORKS_AT_ONCE = 1
MOST_LONG_FORKS_AT_ONCE = 16

_FIRST_BACK_OFF_SECONDS = 0.05
_MOST_BACK_OFF_SECONDS = 5.0

# After so many failed starts in a row, waiting tasks fail rather than hang.
MOST_FAILED_STARTS = 6
# The preload itself may be what kills the zygote: after so many, workers start without it.
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

    One of the kept workers is replaced once it is gone, any other only when a task waits.

    Args:
        schedule: LONG or SHORT.
        kept: how many workers stay without a task.
        capacity: how many workers may exist.
        living: workers that take tasks.
        leaving: workers on their way out.
        idle: workers of `living` that have no task.
        waiting: tasks that wait for a worker.
        requested: workers that were requested and have not started.
    """
    below_kept = kept - living - leaving - requested
    for_work = waiting - idle - requested
    if schedule == SHORT and living > 0:
        for_work = min(for_work, MOST_SHORT_FORKS_AT_ONCE - requested)
    most_now = MOST_LONG_FORKS_AT_ONCE - requested
    return max(0, min(max(below_kept, for_work), capacity - living - requested, most_now))


def reason_to_recycle(*, grown_bytes: int | None) -> str | None:
    """Say why a worker that has finished its task must leave; None when it may stay."""
    if grown_bytes is not None and grown_bytes > MOST_GROWTH_BYTES:
        return f"it had grown by {grown_bytes / MB:.0f} MB"
    return None


def back_off_seconds(failures: int) -> float:
    """Say how long to wait before the next start, after so many that failed in a row."""
    return backoff_seconds(failures, first=_FIRST_BACK_OFF_SECONDS, longest=_MOST_BACK_OFF_SECONDS)
