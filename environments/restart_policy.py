# SPDX-License-Identifier: Apache-2.0
"""Decides when an exited replica is restarted. Pure: the caller keeps history and clock.

exited after it was ready for a minute        after the shortest pause, whatever came before
exited `BUDGET_EXITS` times in the window     the next one is the last: give up
otherwise                                     after a pause that doubles with every exit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..system.process.backoff import backoff_seconds

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
BUDGET_EXITS = 5
BUDGET_WINDOW_SECONDS = 600.0
HEALTHY_SECONDS = 60.0  # ready for this long: what happened before is forgiven


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start it again after a pause.

    `forgiven`: it had been healthy, so the caller keeps only the latest exit of its history.
    """

    seconds: float
    forgiven: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart it. `reason` is a clause for people."""

    reason: str


def restart_decision(
    exits: Sequence[float], *, ready_since: float | None, now: float
) -> RestartAfter | GiveUp:
    """What to do about a replica that has just died.

    `exits` are the times it died, this time included; `ready_since` is when it last became ready,
    None when it never did since its last start. All on one clock, in seconds.
    """
    if ready_since is not None and now - ready_since >= HEALTHY_SECONDS:
        return RestartAfter(FIRST_PAUSE_SECONDS, forgiven=True)
    recent = sum(1 for at in exits if now - at <= BUDGET_WINDOW_SECONDS)
    if recent > BUDGET_EXITS:
        minutes = BUDGET_WINDOW_SECONDS / 60
        return GiveUp(f"it exited {recent} times within {minutes:.0f} minutes")
    return RestartAfter(pause_seconds(recent))


def pause_seconds(exits: int) -> float:
    """How long to wait after so many exits in a row."""
    return backoff_seconds(max(exits, 1), first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
