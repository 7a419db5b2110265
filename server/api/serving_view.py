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
    """Count the shards whose event loop is blocked: `{"shards", "since"}`; None when none is.

    The shims' last status says so, which is seconds old at most.
    """
    held = [capacity for live in lives if "held_since" in (capacity := live.get("capacity") or {})]
    if not held:
        return None
    shards = sum(
        count for one in held for state, count in one["shards"].items() if state in BLOCKED
    )
    return {"shards": shards, "since": min(one["held_since"] for one in held)}


def shard_exit_view(live: Json | None) -> Json | None:
    """`{"count", "at", "message", …}` of the last process that died below a server that lives."""
    last: Json | None = (live or {}).get("last_shard_exit")
    if last is None:
        return None
    return {**last, "count": (live or {}).get("shard_exits", 1), "message": _message(last)}


def _sentence(shards: int, *, as_is: bool) -> str:
    if as_is:
        return "as it is: the project's own server"
    return "1 shard" if shards == 1 else f"{shards} shards"


def _isolated_sentence(lives: Iterable[Json]) -> str:
    """Say what a session's process holds of its own, once one was measured."""
    sizes = ((live.get("capacity") or {}).get("isolated_session_bytes") for live in lives)
    measured = [size for size in sizes if size]
    cost = f", {max(measured) / MB:.0f} MB each" if measured else ""
    return f"isolated: a process per session{cost}"


def _message(last: Json) -> str:
    what = f"shard {last.get('shard')}"
    if last.get("shared_state"):
        what = "the process of the shared state"
    elif last.get("isolated"):
        what = "an isolated session"
    how = "died"
    if last.get("reason"):
        how = ExitReason.from_json(last["reason"]).sentence()
    lost = last.get("sessions", 0)
    sessions = "1 session" if lost == 1 else f"{lost} sessions"
    cost = "" if last.get("isolated") else f"; {sessions} ended with it, and it was replaced"
    return f"{what} (pid {last.get('pid')}) {how}{cost}"
