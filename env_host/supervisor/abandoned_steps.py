# SPDX-License-Identifier: Apache-2.0
"""When a shard with an abandoned step is replaced: one that runs although its session has ended.

    its session timed out, or its client left; a thread cannot be interrupted
      ├─ it returns                          nothing is done
      ├─ no other session is in the shard    replaced, once the step has run for a while
      └─ others are, and their loop is held  replaced at once: their clients get the reason

The process of an isolated session that is over is ended after the same while. Decisions alone, from
the shard's row of the scoreboard; the supervisor carries them out (`supervisor.py`).
"""

from __future__ import annotations

from enum import Enum

from ..ipc.capacity import abandoned_seconds
from ..ipc.scoreboard import Counters, Field

POLL_INTERVAL_SECONDS = 1.0  # while there is such a step
PATIENCE_SECONDS = 10.0  # for a step to return, from its beginning
STARVED = "was replaced, since an abandoned step kept its other sessions waiting"


class Replacement(Enum):
    """What is to become of a shard."""

    NONE = "none"
    WHEN_IDLE = "when idle"  # it has no other session: none is lost
    AT_ONCE = "at once"  # its sessions are starved


def replacement_of(row: Counters, now: int, *, is_exclusive: bool) -> Replacement:
    """Decide on one shard; `now` in microseconds of the scoreboard's clock.

    `is_exclusive`: an abandoned session keeps the only slot that there is.
    """
    if not row[Field.ABANDONED] or abandoned_seconds(row, now) < PATIENCE_SECONDS:
        return Replacement.NONE
    others = row.load - (row[Field.ABANDONED] if is_exclusive else 0)
    if others <= 0:
        return Replacement.WHEN_IDLE
    is_starved = row.is_serving and not row.is_responsive(now)
    return Replacement.AT_ONCE if is_starved else Replacement.NONE


def describe(row: Counters, now: int) -> str:
    """Return the clause for the log."""
    count = row[Field.ABANDONED]
    what = "1 abandoned step has" if count == 1 else f"{count} abandoned steps have"
    return f"{what} run for {abandoned_seconds(row, now):.0f} s"
