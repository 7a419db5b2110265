# SPDX-License-Identifier: Apache-2.0
"""How an environment is served, and which of its processes have died meanwhile, for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...env_host.ipc.capacity import BLOCKED
from ...processes.exits.exit_reason import ExitReason
from ...system.units import MB

Json = dict[str, Any]


def serving_view(lives: Iterable[Json | None]) -> Json | None:
    """`{"shards", "isolated", "sentence", "held"}` of all replicas; None until one is ready."""
    known = [live for live in lives if live]
    infos = [info for live in known if (info := live.get("info"))]
    if not infos:
        return None
    shards = sum(info.get("shards", 1) for info in infos)
    is_isolated = any(info.get("isolate") for info in infos)
    as_is = infos[0].get("serving") == "as_is"
    return {
        "shards": shards,
        "isolated": is_isolated,
        "sentence": _isolated_sentence(known) if is_isolated else _sentence(shards, as_is=as_is),
        "held": _held_view(known),
    }


def _held_view(lives: Iterable[Json]) -> Json | None:
    """`{"shards", "since"}` of those in which something keeps the loop; None when it turns in all.

    As their shims said last, which is seconds ago at most.
    """
    told = [capacity for live in lives if "held_since" in (capacity := live.get("capacity") or {})]
    if not told:
        return None
    shards = sum(
        count for one in told for state, count in one["shards"].items() if state in BLOCKED
    )
    return {"shards": shards, "since": min(one["held_since"] for one in told)}


def shard_exit_view(live: Json | None) -> Json | None:
    """`{"count", "at", "message", …}` of the last process that died below a server that lives."""
    told: Json | None = (live or {}).get("last_shard_exit")
    if told is None:
        return None
    return {**told, "count": (live or {}).get("shard_exits", 1), "message": _message(told)}


def _sentence(shards: int, *, as_is: bool) -> str:
    if as_is:
        return "as it is: the project's own server"
    return "1 shard" if shards == 1 else f"{shards} shards"


def _isolated_sentence(lives: Iterable[Json]) -> str:
    """With what a session's process holds of its own, once one was there to be measured."""
    told = ((live.get("capacity") or {}).get("isolated_session_bytes") for live in lives)
    measured = [held for held in told if held]
    cost = f", {max(measured) / MB:.0f} MB each" if measured else ""
    return f"isolated: a process per session{cost}"


def _message(told: Json) -> str:
    what = f"shard {told.get('shard')}"
    if told.get("isolated"):
        what = "an isolated session"
    elif told.get("shared_state"):
        what = "the process of the shared state"
    if told.get("shared_state"):
        what = "the process of the shared state"
    how = "died"
    if told.get("reason"):
        how = ExitReason.from_json(told["reason"]).sentence()
    lost = told.get("sessions", 0)
    sessions = "1 session" if lost == 1 else f"{lost} sessions"
    cost = "" if told.get("isolated") else f"; {sessions} ended with it, and it was replaced"
    return f"{what} (pid {told.get('pid')}) {how}{cost}"
