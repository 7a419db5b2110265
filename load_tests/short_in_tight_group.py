# SPDX-License-Identifier: Apache-2.0
"""SHORT requests at once in a group with little of everything: ours, and a peer's.

First whether it starts at all, and is still there after a while without work; then 1, 2, 4, 8, …
requests at once, until the kernel has killed something, or one of them has not succeeded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from load_tests.api_client import ApiClient
from load_tests.skypilot_peer import Kind, PeerClient, settle_seconds, started
from load_tests.tight_group import Group, Size

MOST_AT_ONCE = 64
START_SECONDS = 180.0
BATCH_SECONDS = 120.0
LOOK_SECONDS = 0.2

Key = tuple[str, str]  # name, unit

STARTS = ("(d) starts (aim: 1)", "")
START = ("(d) start to healthy", "s")
IDLE_KILLS = ("(d) kernel kills while it starts and idles (aim: 0)", "")
AT_ONCE = (f"(d) SHORT requests at once (tried {MOST_AT_ONCE})", "")
KILLS = ("(d) kernel kills (aim: 0)", "")
PEAK = ("(d) memory at the peak, page cache included", "MB")


def short_of_ours(group: Group, home: str, seconds: float) -> dict[Key, float]:
    """A daemon that took `seconds` to start."""

    async def check() -> None:
        client = ApiClient(home)
        request = await client.run("check", {})
        await client.close()
        assert request["state"] == "SUCCEEDED", request["error"]

    idle = group.kills()
    at_once = asyncio.run(_more_and_more(check, group))
    return {STARTS: 1, START: seconds, IDLE_KILLS: idle, AT_ONCE: at_once}


def short_of_peer(kind: Kind, size: Size) -> dict[Key, float]:
    """In a group of its own."""
    group = Group(size)
    try:
        with started(kind, group.inside, START_SECONDS) as peer:

            async def status() -> None:
                client = PeerClient(peer.port)
                await client.run()
                await client.close()

            time.sleep(settle_seconds(kind))
            idle = group.kills()
            at_once = asyncio.run(_more_and_more(status, group)) if peer.is_healthy else 0
            return {
                STARTS: peer.is_healthy,
                START: peer.seconds,
                IDLE_KILLS: idle,
                AT_ONCE: at_once,
                KILLS: group.kills(),
                PEAK: group.peak_mb(),
            }
    finally:
        group.remove()


async def _more_and_more(run: Callable[[], Awaitable[None]], group: Group) -> int:
    """How many succeeded at once without a kill, at most."""
    best, count = 0, 1
    while count <= MOST_AT_ONCE and await _all_succeed(run, count, group):
        best, count = count, 2 * count
    return best


async def _all_succeed(run: Callable[[], Awaitable[None]], count: int, group: Group) -> bool:
    kills = group.kills()
    deadline = time.monotonic() + BATCH_SECONDS
    tasks = {asyncio.ensure_future(run()) for _ in range(count)}
    pending = tasks
    while pending and group.kills() == kills and time.monotonic() < deadline:
        _, pending = await asyncio.wait(pending, timeout=LOOK_SECONDS)
    for task in pending:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return group.kills() == kills and all(outcome is None for outcome in outcomes)
