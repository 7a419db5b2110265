# SPDX-License-Identifier: Apache-2.0
"""How full an environment is, read from the scoreboard: `GET /capacity`.

Any shard answers for all of them. A shard's `state` tells apart

    starting       its process is there, and does not accept yet
    alive, busy    its loop runs; runs, but most of the time late
    wedged         its loop has been blocked for a second or more, or its process is stopped
    stopping       it ends its sessions
    absent         no process; it is about to be started
    parked         no process: the others are enough for the sessions there are
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .scoreboard import ALIVE_SECONDS, MICROSECONDS, Counters, Field, Scoreboard

BUSY_SECONDS = 0.1  # median lag of a loop that is called busy

Json = dict[str, Any]


def capacity_of(scoreboard: Scoreboard, now: int) -> Json:
    """Return the answer of `/capacity`; `now` in microseconds of the scoreboard's clock."""
    shards = scoreboard.shard_counters()
    return {
        "sessions": _total(shards, Field.SESSIONS),
        "max_sessions": _total(shards, Field.MAX_SESSIONS),
        "draining": any(counters[Field.DRAINING] for counters in shards),
        "waiting": _total(shards, Field.WAITING),
        "longest_wait_seconds": max(
            (waited_seconds(counters, now) for counters in shards), default=0.0
        ),
        "shards": [shard_of(counters, now) for counters in shards],
        "isolated": [
            _isolated(counters)
            for counters in scoreboard
            if counters[Field.ISOLATED] and counters[Field.PID] > 0
        ],
    }


def summary_of(scoreboard: Scoreboard, now: int) -> Json:
    """Summarize all shards for the shim and the daemon's metrics.

    Lag is in steps of 10 ms, so that a replica with nothing to do has nothing new to say.
    """
    shards = scoreboard.shard_counters()
    states = Counter(state_of(counters, now) for counters in shards)
    return {
        "max_sessions": _total(shards, Field.MAX_SESSIONS),
        "waiting": _total(shards, Field.WAITING),
        "begun": _total(shards, Field.BEGUN),
        "refused": _total(shards, Field.REFUSED),
        "steps": _total(shards, Field.STEPS),
        "step_timeouts": _total(shards, Field.STEP_TIMEOUTS),
        "lag_p99_seconds": _coarse(max(counters[Field.LAG_P99] for counters in shards)),
        "lag_max_seconds": _coarse(max(counters[Field.LAG_MAX] for counters in shards)),
        "shards": dict(sorted(states.items())),
    }


def shard_of(counters: Counters, now: int) -> Json:
    """Return all fields of `/capacity` for one shard."""
    return {
        "index": counters.index,
        "pid": counters[Field.PID] or None,
        "generation": counters[Field.GENERATION],
        "state": state_of(counters, now),
        "sessions": counters[Field.SESSIONS],
        "max_sessions": counters[Field.MAX_SESSIONS],
        "promised": counters[Field.PROMISED],
        "waiting": counters[Field.WAITING],
        "longest_wait_seconds": waited_seconds(counters, now),
        "busy": counters[Field.BUSY],
        "heartbeat_seconds": heartbeat_seconds(counters, now),
        "lag": {
            "p50_seconds": counters[Field.LAG_P50] / MICROSECONDS,
            "p99_seconds": counters[Field.LAG_P99] / MICROSECONDS,
            "max_seconds": counters[Field.LAG_MAX] / MICROSECONDS,
        },
        "totals": {
            "connections": counters[Field.CONNECTIONS],
            "sessions": counters[Field.BEGUN],
            "refused": counters[Field.REFUSED],
            "handed_over": counters[Field.HANDED_OVER],
            "steps": counters[Field.STEPS],
            "step_timeouts": counters[Field.STEP_TIMEOUTS],
        },
    }


def state_of(counters: Counters, now: int) -> str:
    """Return one of the states above."""
    if counters[Field.PID] <= 0:
        return "parked" if counters[Field.PARKED] else "absent"
    if counters[Field.STOPPING]:
        return "stopping"
    if not counters[Field.READY]:
        return "starting"
    if counters[Field.IDLE]:
        return "alive"
    if now - counters[Field.HEARTBEAT] >= ALIVE_SECONDS * MICROSECONDS:
        return "wedged"
    return "busy" if counters[Field.LAG_P50] >= BUSY_SECONDS * MICROSECONDS else "alive"


def note_awake(counters: Counters, now: int) -> None:
    """Write that a shard has something to do again.

    Its last heartbeat is as old as the shard's idleness, and would be taken for that of a loop that
    has been blocked since then.
    """
    counters[Field.HEARTBEAT] = now
    counters[Field.IDLE] = 0  # last: until then, nothing else is read


def blocked_seconds(scoreboard: Scoreboard, now: int) -> float | None:
    """Return how long the longest blocked shard has been blocked; None if none is."""
    blocked = (s for s in scoreboard.shard_counters() if state_of(s, now) == "wedged")
    return max((heartbeat_seconds(counters, now) or 0.0 for counters in blocked), default=None)


def waited_seconds(counters: Counters, now: int) -> float:
    """Return how long the oldest waiting connection has waited, in seconds."""
    since = counters[Field.OLDEST_WAIT]
    return max(0, now - since) / MICROSECONDS if since else 0.0


def heartbeat_seconds(counters: Counters, now: int) -> float | None:
    """Return the seconds since the shard's loop last ran; None if it never did."""
    beat = counters[Field.HEARTBEAT]
    return max(0, now - beat) / MICROSECONDS if beat else None


def _isolated(counters: Counters) -> Json:
    return {
        "pid": counters[Field.PID],
        "sessions": counters[Field.SESSIONS],
        "busy": counters[Field.BUSY],
    }


def _coarse(microseconds: int) -> float:
    return round(microseconds / MICROSECONDS, 2)


def _total(rows: Sequence[Counters], field: Field) -> int:
    return sum(counters[field] for counters in rows)
