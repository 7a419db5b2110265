# SPDX-License-Identifier: Apache-2.0
"""How many replicas, and how many sessions each of them may have: decisions alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..schema.errors import InvalidSpec


def share_sessions(
    max_sessions: int | None, replicas: int, most: int | None = None
) -> list[int | None]:
    """How many sessions each replica may have, as evenly as it goes.

    An environment that scales itself has up to `most` replicas: each has its share of those, so
    that more replicas have room for more sessions.

    Raises:
        InvalidSpec: a replica would have none.
    """
    if max_sessions is None:
        return [None] * replicas
    of = max(replicas, most or 0)
    if max_sessions < of:
        raise InvalidSpec(
            f"{of} replicas cannot share {max_sessions} sessions",
            f"use {max_sessions} replicas or fewer, or a higher --max-sessions",
        )
    each, left = divmod(max_sessions, of)
    return [each + (ordinal < left) for ordinal in range(replicas)]


UP_SHARE = 0.8  # of the slots are taken: there are to be more replicas
TARGET_SHARE = 0.6  # of the slots, which that many more leave taken
DOWN_SHARE = 0.5  # of the slots of one replica fewer: there may be fewer


@dataclass(frozen=True, slots=True)
class Scaling:
    """How an environment scales itself."""

    least: int
    most: int
    down_seconds: float  # for which fewer must have been enough


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The replicas that an environment has, without those being drained, and their sessions."""

    replicas: int
    slots: int  # of one replica
    sessions: int  # of all of them


@dataclass(frozen=True, slots=True)
class Lull:
    """Fewer replicas than there are have been enough."""

    since: float  # monotonic
    enough: int  # the most that were wanted in this time


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas there are to be, and what is remembered until the next decision."""

    replicas: int
    lull: Lull | None = None
    look_at: float | None = None  # monotonic; when to decide again although nothing has changed


def wanted_replicas(seen: Occupancy, scaling: Scaling) -> int:
    """Return how many replicas are wanted for as many sessions as there are now.

    Between `DOWN_SHARE` and `UP_SHARE` nothing is wanted: what a change leaves taken lies between
    them, so that a change is never the reason for the next one.
    """
    fitting = math.ceil(seen.sessions / (TARGET_SHARE * seen.slots))
    wanted = seen.replicas
    if seen.sessions > UP_SHARE * seen.slots * seen.replicas:
        wanted = max(fitting, seen.replicas + 1)
    elif seen.sessions <= DOWN_SHARE * seen.slots * (seen.replicas - 1):
        wanted = min(fitting, seen.replicas - 1)
    return min(max(wanted, scaling.least), scaling.most)


def decide(seen: Occupancy, scaling: Scaling, lull: Lull | None, now: float) -> Decision:
    """Return how many replicas there are to be: more at once, fewer when it has lasted."""
    wanted = wanted_replicas(seen, scaling)
    if wanted >= seen.replicas:
        return Decision(wanted)
    if lull is None or lull.enough >= seen.replicas:  # of when there were more
        lull = Lull(now, wanted)
    lull = Lull(lull.since, max(lull.enough, wanted))
    due = lull.since + scaling.down_seconds
    if now < due:
        return Decision(seen.replicas, lull, look_at=due)
    return Decision(lull.enough)
