# SPDX-License-Identifier: Apache-2.0
"""Decisions about replicas: pure functions, whose caller keeps history and clock.

Number: how many replicas there are, and how many sessions each may have (`decide`,
`share_sessions`).

Replacement: one replica after another, or several at a time (`replacement_step`,
`replacement_room`).

Restarts:

it was ready for a minute before it exited     after the shortest pause, whatever came before
it exited `BUDGET_EXITS` times in the window   at the next exit: give up
otherwise                                      after a pause that doubles with every exit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..schema.errors import InvalidSpec
from ..system.process.backoff import backoff_seconds
from ..system.text.units import plural


def share_sessions(
    max_sessions: int | None, replicas: int, most: int | None = None
) -> list[int | None]:
    """Return how many sessions each replica may have: `max_sessions`, divided evenly.

    An environment that scales itself has up to `most` replicas. The sessions are divided by that
    number, so that more replicas have room for more sessions. Raises `InvalidSpec` if a replica
    would have none.
    """
    if max_sessions is None:
        return [None] * replicas
    of = max(replicas, most or 0)
    if max_sessions < of:
        raise InvalidSpec(
            f"{plural(of, 'replica')} cannot share {plural(max_sessions, 'session')}",
            f"use {plural(max_sessions, 'replica')} or fewer, or a higher --max-sessions",
        )
    each, left = divmod(max_sessions, of)
    return [each + (ordinal < left) for ordinal in range(replicas)]


def replacement_step(
    wanted: int, room: tuple[int, int], *, staying: int, old: int, new: int, ready: int, ending: int
) -> tuple[int, int]:
    """Return how many replicas are to be started now, and how many old ones drained.

    The answer follows from the present numbers alone, whatever has died in between. Old replicas
    are drained as new ones become ready, and no more are alive at once than there is room for.

    Args:
        wanted: How many replicas the environment is to have in the end.
        room: How many more there may be at once, and how many fewer ready (`replacement_room`).
        staying: How many of its replicas are not to be replaced.
        old: How many are to be replaced, and are not drained yet.
        new: How many have been started in place of others.
        ready: How many of the new ones are ready.
        ending: How many are drained, and have not ended.
    """
    surge, unavailable = room
    start = min(wanted - staying - new, wanted + surge - (staying + old + new + ending))
    drain = min(old, staying + old + ready - (wanted - unavailable))
    return max(0, start), max(0, drain)


def replacement_room(
    replicas: int, max_surge: str | None, max_unavailable: str | None, *, default_surge: int
) -> tuple[int, int]:
    """Return how many replicas more, and how many fewer, there may be during a replacement.

    Both settings are numbers, or percentages of `replicas`: the first is rounded up, the other
    down. If both are 0, no replica could be replaced, so one may be missing.

    https://kubernetes.io/docs/concepts/workloads/controllers/deployment/#rolling-update-deployment
    """
    surge = default_surge if max_surge is None else math.ceil(_part_of(replicas, max_surge))
    missing = int(_part_of(replicas, max_unavailable or "0"))
    return surge, missing or int(not surge)


def _part_of(replicas: int, text: str) -> float:
    number, percent, _ = text.partition("%")
    return int(number) * replicas / 100 if percent else int(number)


UP_SHARE = 0.8  # of the slots: if more are taken, replicas are added
TARGET_SHARE = 0.6  # of the slots: as many are taken after a change
DOWN_SHARE = 0.5  # of the slots of one replica fewer: if no more are taken, replicas are removed


@dataclass(frozen=True, slots=True)
class Scaling:
    """The limits within which an environment scales itself."""

    least: int
    most: int
    down_seconds: float  # how long fewer replicas must have been enough


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The replicas of an environment that are not being drained, and their sessions."""

    replicas: int
    slots: int  # of one replica
    sessions: int  # of all of them


@dataclass(frozen=True, slots=True)
class DownWindow:
    """The stabilization window of a scale-down."""

    since: float  # monotonic; fewer replicas have been enough since then
    enough: int  # the largest number that was wanted in this time


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas that is wanted, and what the next decision needs to know."""

    replicas: int
    window: DownWindow | None = None
    look_at: float | None = None  # monotonic; when to decide again, even if nothing changes


def wanted_replicas(seen: Occupancy, scaling: Scaling) -> int:
    """Return how many replicas are wanted for as many sessions as there are now.

    Between `DOWN_SHARE` and `UP_SHARE` the number stays. `TARGET_SHARE` lies between them, so that
    one change never causes the next.
    """
    fitting = math.ceil(seen.sessions / (TARGET_SHARE * seen.slots))
    wanted = seen.replicas
    if seen.sessions > UP_SHARE * seen.slots * seen.replicas:
        wanted = max(fitting, seen.replicas + 1)
    elif seen.sessions <= DOWN_SHARE * seen.slots * (seen.replicas - 1):
        wanted = min(fitting, seen.replicas - 1)
    return min(max(wanted, scaling.least), scaling.most)


def decide(seen: Occupancy, scaling: Scaling, window: DownWindow | None, now: float) -> Decision:
    """Decide how many replicas are wanted: more at once, fewer after the stabilization window."""
    wanted = wanted_replicas(seen, scaling)
    if wanted >= seen.replicas:
        return Decision(wanted)
    if window is None or window.enough >= seen.replicas:  # it began when there were more
        window = DownWindow(now, wanted)
    window = DownWindow(window.since, max(window.enough, wanted))
    due = window.since + scaling.down_seconds
    if now < due:
        return Decision(seen.replicas, window, look_at=due)
    return Decision(window.enough)


FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
BUDGET_EXITS = 5
BUDGET_WINDOW_SECONDS = 600.0
HEALTHY_SECONDS = 60.0  # a replica that was ready for so long has its earlier exits forgiven


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start it again after a pause.

    If it is `forgiven`, since it had been healthy, the caller keeps only the latest exit.
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
    """Decide whether, and after which pause, to start a replica that has just died.

    `exits` are the times of its deaths, this one included. `ready_since` is when it became ready
    after its last start; None: it did not. All are seconds of one clock.
    """
    if ready_since is not None and now - ready_since >= HEALTHY_SECONDS:
        return RestartAfter(FIRST_PAUSE_SECONDS, forgiven=True)
    recent = sum(1 for at in exits if now - at <= BUDGET_WINDOW_SECONDS)
    if recent > BUDGET_EXITS:
        minutes = BUDGET_WINDOW_SECONDS / 60
        return GiveUp(f"it exited {recent} times within {minutes:.0f} minutes")
    pause = backoff_seconds(recent, first=FIRST_PAUSE_SECONDS, longest=MAX_PAUSE_SECONDS)
    return RestartAfter(pause)
