# SPDX-License-Identifier: Apache-2.0
"""Asks a replica's server over HTTP what a shim would have got through its pipe.

/health      every server: whether it is ready
/capacity    an env host of ours: sessions and counters (`env_host/ipc/reports.py`), and why
             sessions fail; how an app without sessions is served (`env_host/serving/own_app.py`)
DRAIN_ROUTE  the same: drains itself, where no signal can be sent to it

Whatever its address is, it is called by a name that every server may be called by.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

from ...env_host.ipc.reports import abandoned_steps
from ...schema.errors import NotAnswering
from ...schema.protocol import DRAIN_HEADER, DRAIN_ROUTE, LOOPBACK, Serving
from ...schema.replica import Capacity, ServerInfo
from ...system.net.access import bearer_header, without_token
from ...system.text.json_lines import Json
from ..access import MAX_ANSWER_BYTES, ask, read_answer
from .base import EngineRefused

TIMEOUT_SECONDS = 2.0
DRAIN_SECONDS = 5.0


async def why_not_healthy(base_url: str, seconds: float = TIMEOUT_SECONDS) -> str | None:
    """Return why a server is not ready, by its `/health`; None when it is."""
    try:
        await _get(base_url, "/health", seconds)
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


async def read_capacity(base_url: str) -> Json | None:
    """Return the answer of `/capacity`; None for a server that has none.

    Raises:
        NotAnswering: The server does not answer at the moment.
    """
    try:
        found = await _get(base_url, "/capacity", TIMEOUT_SECONDS)
    except NotAnswering as exc:
        if exc.may_pass:
            raise
        return None
    return found if isinstance(found, dict) and "sessions" in found else None


async def _get(base_url: str, path: str, seconds: float) -> Any:
    """Return the JSON that a server answers, as `ask` does, without a thread for each question.

    A server that cannot be reached takes the whole time limit. By HTTP/1.0 an answer ends with its
    connection, and has no chunks.
    """
    address, token = without_token(base_url)
    parts = urlsplit(address)
    headers = {"Host": LOOPBACK, **bearer_header(token)}
    lines = [f"GET {parts.path.rstrip('/')}{path} HTTP/1.0", *map(": ".join, headers.items())]
    answer = b""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(writer):
                writer.write("\r\n".join([*lines, "", ""]).encode())
                while (part := await reader.read(2**16)) and len(answer) < MAX_ANSWER_BYTES:
                    answer += part
    except (OSError, TimeoutError) as exc:
        why = str(exc) or "timed out"
        raise NotAnswering(f"nothing answers at {address}{path}: {why}") from exc
    head, _, body = answer.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.\d (\d{3}) ?([^\r\n]*)", head)
    if found is None:
        raise NotAnswering(f"nothing answers at {address}{path}: it is no HTTP server")
    return read_answer(f"{address}{path}", int(found[1]), found[2].decode("latin-1"), body)


def ask_to_drain(base_url: str, secret: str) -> None:
    """Make a server end with its last session, as `signal` would. Blocks.

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
