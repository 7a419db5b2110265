# SPDX-License-Identifier: Apache-2.0
"""SHORT requests at once in a group with little of everything: ours, and a peer's.

First whether it starts at all, and is still there after a while without work; then 1, 2, 4, 8, …
requests at once, until the kernel has killed something, or one of them has not succeeded. After a
kill the others have 15 s more to end; then it is asked whether it still answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from load_tests.peers.pool_peer import POOL
from load_tests.peers.skypilot_peer import SKYPILOT, Kind, PeerClient, answers, started
from load_tests.shared.api_client import ApiClient
from load_tests.shared.tight_group import Group, Size

MOST_AT_ONCE = 64
START_SECONDS = 180.0
BATCH_SECONDS = 120.0
ANSWER_SECONDS = 10.0
AFTER_KILL_SECONDS = 15.0
LOOK_SECONDS = 0.2
# With half a CPU it takes the latter's workers so long to have imported everything.
IDLE_SECONDS = {POOL: 5.0, SKYPILOT: 60.0}

Key = tuple[str, str]  # name, unit

STARTS = ("(d) starts (aim: 1)", "")
START = ("(d) start to healthy", "s")
IDLE_KILLS = ("(d) kernel kills while it starts and idles (aim: 0)", "")
AT_ONCE = (f"(d) SHORT requests at once (tried {MOST_AT_ONCE})", "")
LOST = ("(d) requests of the last try not succeeded (aim: 0)", "")
ANSWERS = ("(d) answers afterwards (aim: 1)", "")
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
    at_once, lost = asyncio.run(_more_and_more(check, group))
    answers = asyncio.run(_says_status(home))
    return {
        STARTS: 1,
        START: seconds,
        IDLE_KILLS: idle,
        AT_ONCE: at_once,
        LOST: lost,
        ANSWERS: answers,
    }


async def _says_status(home: str) -> bool:
    client = ApiClient(home)
    try:
        return bool(await client.call("GET", "/v1/status"))
    except (OSError, EOFError, RuntimeError):
        return False
    finally:
        await client.close()


def short_of_peer(kind: Kind, size: Size) -> dict[Key, float]:
    """In a group of its own."""
    group = Group(size)
    try:
        with started(kind, group.inside, START_SECONDS) as peer:

            async def status() -> None:
                client = PeerClient(peer.port)
                await client.run()
                await client.close()

            time.sleep(IDLE_SECONDS[kind.name] if peer.is_healthy else 0.0)
            idle = group.kills()
            at_once, lost = asyncio.run(_more_and_more(status, group))
            return {
                STARTS: peer.is_healthy,
                START: peer.seconds,
                IDLE_KILLS: idle,
                AT_ONCE: at_once,
                LOST: lost,
                ANSWERS: answers(peer.port, ANSWER_SECONDS),
                KILLS: group.kills(),
                PEAK: group.peak_mb(),
            }
    finally:
        group.remove()


async def _more_and_more(run: Callable[[], Awaitable[None]], group: Group) -> tuple[int, int]:
    """How many succeeded at once without a kill, at most; how many of the last try did not."""
    best, count, kills, lost = 0, 1, group.kills(), 0
    while count <= MOST_AT_ONCE and group.kills() == kills and not lost:
        lost = await _lost(run, count, group)
        if group.kills() == kills and not lost:
            best = count
        count *= 2
    return best, lost


async def _lost(run: Callable[[], Awaitable[None]], count: int, group: Group) -> int:
    """How many of `count` at once did not succeed in time."""
    kills, is_killed = group.kills(), False
    deadline = time.monotonic() + BATCH_SECONDS
    tasks = {asyncio.ensure_future(run()) for _ in range(count)}
    pending = tasks
    while pending and time.monotonic() < deadline:
        _, pending = await asyncio.wait(pending, timeout=LOOK_SECONDS)
        if group.kills() > kills and not is_killed:
            is_killed, deadline = True, time.monotonic() + AFTER_KILL_SECONDS
    for task in pending:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return sum(outcome is not None for outcome in outcomes)
