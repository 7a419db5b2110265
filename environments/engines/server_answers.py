# SPDX-License-Identifier: Apache-2.0
"""What a replica's server answers over HTTP, as a shim would have got through its pipe.

/health      every server: whether it is ready
/capacity    an env host of ours: sessions and counters (`env_host/ipc/reports.py`), and why
             sessions fail; how an app without sessions is served (`env_host/serving/own_app.py`)
DRAIN_ROUTE  the same: drains itself, where no signal can be sent to it

Whatever its address is, it is called by a name that every server may be called by.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

from ...env_host.ipc.reports import abandoned_steps
from ...schema.errors import NotAnswering
from ...schema.protocol import DRAIN_HEADER, DRAIN_ROUTE, LOOPBACK, Serving
from ...schema.replica import Capacity, ServerInfo
from ...system.text.json_lines import Json
from ..access import ask
from .base import EngineRefused

TIMEOUT_SECONDS = 2.0
DRAIN_SECONDS = 5.0


def why_not_healthy(base_url: str, seconds: float = TIMEOUT_SECONDS) -> str | None:
    """Return why a server is not ready, by its `/health`; None when it is. Blocks."""
    try:
        ask(base_url, "/health", seconds, host=LOOPBACK)
    except NotAnswering as exc:
        return exc.message
    return None


async def where_it_answers(
    own: str, usual: str, why_not: Callable[[str], Awaitable[str | None]]
) -> tuple[str, str | None]:
    """Return the address at which a server answers, its own if it does there; or why it does not.

    Its own is asked again when only the usual one has answered: the server may have begun to listen
    in between, and sessions at the usual one may end with the engine.
    """
    why = await why_not(own)
    if why is None or own == usual:
        return own, why
    why = await why_not(usual)
    if why is None and await why_not(own) is None:
        return own, None
    return usual, why


def read_capacity(base_url: str) -> Json | None:
    """Return the answer of `/capacity`; None for a server that has none. Blocks.

    Raises:
        NotAnswering: The server does not answer at the moment.
    """
    try:
        found = ask(base_url, "/capacity", TIMEOUT_SECONDS, host=LOOPBACK)
    except NotAnswering as exc:
        if exc.may_pass:
            raise
        return None
    return found if isinstance(found, dict) and "sessions" in found else None


def ask_to_drain(base_url: str, secret: str) -> None:
    """Have a server end with its last session, as `signal` would. Blocks.

    Raises:
        NotAnswering: The server does not answer at the moment.
        EngineRefused: It will not.
    """
    headers = {DRAIN_HEADER: secret}
    try:
        ask(base_url, DRAIN_ROUTE, DRAIN_SECONDS, host=LOOPBACK, method="POST", headers=headers)
    except NotAnswering as exc:
        if exc.may_pass:
            raise
        raise EngineRefused(exc.message) from exc


def ready_info(capacity: Json | None) -> ServerInfo:
    """Return the `info` of a status: what a server says of itself when it is ready."""
    if capacity is None or "serving" in capacity:  # there are no sessions of ours
        own = cast("ServerInfo", capacity or {"serving": Serving.AS_IS, "notes": []})
        return {"ready": True, "max_sessions": None, **own}
    return {
        "ready": True,
        "max_sessions": capacity.get("max_sessions"),
        "serving": Serving.SESSIONS,
        "shards": len(capacity["shards"]),
        "isolate": bool(capacity.get("isolated")),
        "notes": [],
    }


def summary(capacity: Json) -> Capacity:
    """Return the `capacity` of a status: the counters of all shards together."""
    shards = capacity["shards"]
    totals = [shard["totals"] for shard in shards]
    lags = [shard["lag"] for shard in shards]
    return {
        "max_sessions": capacity["max_sessions"],
        "waiting": capacity["waiting"],
        "begun": sum(each["sessions"] for each in totals),
        "refused": sum(each["refused"] for each in totals),
        "steps": sum(each["steps"] for each in totals),
        "step_timeouts": sum(each["step_timeouts"] for each in totals),
        "lag_p99_seconds": max((round(each["p99_seconds"], 2) for each in lags), default=0.0),
        "lag_max_seconds": max((round(each["max_seconds"], 2) for each in lags), default=0.0),
        "shards": dict(sorted(Counter(shard["state"] for shard in shards).items())),
        "abandoned": abandoned_steps(shards, time.time()),
        "left": capacity.get("left", []),
    }
