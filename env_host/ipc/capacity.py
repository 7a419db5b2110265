# SPDX-License-Identifier: Apache-2.0
"""How full an environment is, read off the board: `GET /capacity` (`metrics.py` renders the same).

Any shard answers for all of them. A shard's `state` tells apart

    starting       its process is there, and does not accept yet
    alive, busy    its loop turns; turns late all the time
    wedged         something has held its loop for a second and more; its watchdog says so
    unresponsive   not even its watchdog's thread is heard of: stopped, or C code keeps the GIL
    stopping       it ends its sessions
    absent         no process; its successor is due
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...system.loop_lag import LoopState
from .scoreboard import MICROSECONDS, Board, Slot, Word

UNRESPONSIVE_SECONDS = 5.0  # the watchdog's thread beats once a second
HELD = frozenset({"wedged", "unresponsive"})

Json = dict[str, Any]

_LOOP_STATES = tuple(LoopState)


def capacity_of(board: Board, now: int) -> Json:
    """The answer of `/capacity`; `now` in microseconds of the board's clock."""
    shards = board.serving_slots()
    return {
        "sessions": _total(shards, Word.SESSIONS),
        "max_sessions": _total(shards, Word.MAX_SESSIONS),
        "waiting": _total(shards, Word.WAITING),
        "longest_wait_seconds": max((waited_seconds(slot, now) for slot in shards), default=0.0),
        "shards": [shard_of(slot, now) for slot in shards],
        "isolated": [
            _isolated(slot) for slot in board if slot[Word.ISOLATED] and slot[Word.PID] > 0
        ],
    }


def summary_of(board: Board, now: int) -> Json:
    """All shards in a few numbers: what the shim is told, and the daemon's metrics show.

    Lag is in steps of 10 ms, so that a replica with nothing to do has nothing new to say.
    """
    shards = board.serving_slots()
    states = Counter(state_of(slot, now) for slot in shards)
    return {
        "max_sessions": _total(shards, Word.MAX_SESSIONS),
        "waiting": _total(shards, Word.WAITING),
        "begun": _total(shards, Word.BEGUN),
        "refused": _total(shards, Word.REFUSED),
        "steps": _total(shards, Word.STEPS),
        "step_timeouts": _total(shards, Word.STEP_TIMEOUTS),
        "lag_p99_seconds": _coarse(max(slot[Word.LAG_P99] for slot in shards)),
        "lag_max_seconds": _coarse(max(slot[Word.LAG_MAX] for slot in shards)),
        "shards": dict(sorted(states.items())),
    }


def shard_of(slot: Slot, now: int) -> Json:
    """What is known of one shard."""
    return {
        "index": slot.index,
        "pid": slot[Word.PID] or None,
        "generation": slot[Word.GENERATION],
        "state": state_of(slot, now),
        "sessions": slot[Word.SESSIONS],
        "max_sessions": slot[Word.MAX_SESSIONS],
        "promised": slot[Word.PROMISED],
        "waiting": slot[Word.WAITING],
        "longest_wait_seconds": waited_seconds(slot, now),
        "busy": slot[Word.BUSY],
        "heartbeat_seconds": heartbeat_seconds(slot, now),
        "lag": {
            "p50_seconds": slot[Word.LAG_P50] / MICROSECONDS,
            "p99_seconds": slot[Word.LAG_P99] / MICROSECONDS,
            "max_seconds": slot[Word.LAG_MAX] / MICROSECONDS,
        },
        "totals": {
            "connections": slot[Word.CONNECTIONS],
            "sessions": slot[Word.BEGUN],
            "refused": slot[Word.REFUSED],
            "handed_over": slot[Word.HANDED_OVER],
            "steps": slot[Word.STEPS],
            "step_timeouts": slot[Word.STEP_TIMEOUTS],
        },
    }


def state_of(slot: Slot, now: int) -> str:
    """One of the words above."""
    if slot[Word.PID] <= 0:
        return "absent"
    if slot[Word.STOPPING]:
        return "stopping"
    if not slot[Word.READY]:
        return "starting"
    if now - slot[Word.WATCHDOG] > UNRESPONSIVE_SECONDS * MICROSECONDS:
        return "unresponsive"
    return _LOOP_STATES[slot[Word.LOOP_STATE]].value


def held_seconds(board: Board, now: int) -> float | None:
    """For how long the shard that is held the longest has done nothing; None: none is held."""
    held = (s for s in board.serving_slots() if state_of(s, now) in HELD)
    return max((heartbeat_seconds(slot, now) or 0.0 for slot in held), default=None)


def waited_seconds(slot: Slot, now: int) -> float:
    """For how long the first of those that wait for a slot has waited."""
    since = slot[Word.OLDEST_WAIT]
    return max(0, now - since) / MICROSECONDS if since else 0.0


def heartbeat_seconds(slot: Slot, now: int) -> float | None:
    """When its loop turned last, in seconds before now; None: never."""
    beat = slot[Word.HEARTBEAT]
    return max(0, now - beat) / MICROSECONDS if beat else None


def _isolated(slot: Slot) -> Json:
    return {"pid": slot[Word.PID], "sessions": slot[Word.SESSIONS], "busy": slot[Word.BUSY]}


def _coarse(microseconds: int) -> float:
    return round(microseconds / MICROSECONDS, 2)


def _total(slots: Sequence[Slot], word: Word) -> int:
    return sum(slot[word] for slot in slots)
