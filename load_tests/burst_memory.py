# SPDX-License-Identifier: Apache-2.0
"""PSS of everything: idle, at the peak of a burst of 200 requests, and 30 s after it.

The burst is 100 `launch` of `echo` beside 100 `check`, all submitted at once; the environments are
taken down again, so that what is left is the daemon's own. Between two samples the peak may have
been higher. Aim: within 20 MB of idle 30 s after.

Peers take turns with ours (skypilot_peer.py) and get as many of SkyPilot's cheapest requests, but
from 50 clients: SkyPilot starts a process for each that waits, and all at once are more than many a
machine holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from load_tests.idle_memory import MEGABYTE, measure_pss
from load_tests.peers.skypilot_peer import (
    PEER_OPTION,
    Kind,
    Peer,
    PeerClient,
    kinds,
    need,
    settle_seconds,
    started,
)
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import Report, daemon, parse_arguments

AIM_MB = 20
SETTLE_SECONDS = 2.0
SAMPLE_SECONDS = 0.5
PEER_CLIENTS = 50
OURS = "openenvd"


def main() -> None:
    """A fresh daemon, and then each peer afresh, for each repetition."""
    options = parse_arguments(
        "Memory of a burst.",
        repetitions=3,
        requests={"type": int, "default": 200},
        seconds={"type": float, "default": 30.0, "help": "from the burst's end to the last look"},
        peer=PEER_OPTION,
    )
    found: dict[str, list[Around]] = {}
    with kinds(options.peer) as peers:
        for _ in range(options.repetitions):
            found.setdefault(OURS, []).append(_ours(options.requests, options.seconds))
            for kind in peers:
                around = _peer(kind, options.requests, options.seconds)
                found.setdefault(kind.name, []).append(around)
    report = Report(f"PSS of everything around a burst of {options.requests} requests")
    ours = found.pop(OURS)
    for name, unit, value in _columns(options.seconds):
        others = {peer: [value(one) for one in theirs] for peer, theirs in found.items()}
        report.beside(name, unit, [value(one) for one in ours], others)
    report.note("Half of ours are launches, and the peak includes what they launched.")
    report.note("The peers do less: SHORT requests that look into a table, and launch nothing.")
    report.finish(options.json)


@dataclass(frozen=True)
class Around:
    """One burst: PSS in MB and number of processes, three times; and how long it took."""

    idle: tuple[float, int]
    peak: tuple[float, int]
    after: tuple[float, int]
    seconds: float


def _columns(seconds: float) -> list[tuple[str, str, Callable[[Around], float]]]:
    return [
        ("idle", "MB", lambda one: one.idle[0]),
        ("peak", "MB", lambda one: one.peak[0]),
        (f"{seconds:g} s after", "MB", lambda one: one.after[0]),
        (f"kept (aim: {AIM_MB})", "MB", lambda one: one.after[0] - one.idle[0]),
        ("processes, idle", "", lambda one: one.idle[1]),
        ("processes, peak", "", lambda one: one.peak[1]),
        ("processes, after", "", lambda one: one.after[1]),
        ("the burst took", "s", lambda one: one.seconds),
    ]


def _ours(count: int, seconds: float) -> Around:
    with daemon() as environ:
        home = environ["OPENENV_HOME"]
        time.sleep(SETTLE_SECONDS)
        idle = _look(home)
        peak, took = asyncio.run(_burst(home, count))
        time.sleep(seconds)
        return Around(idle, peak, _look(home), took)


def _peer(kind: Kind, count: int, seconds: float) -> Around:
    with started(kind) as peer:
        need(peer)
        time.sleep(settle_seconds(kind))
        idle = peer.look()
        peak, took = asyncio.run(_burst_of_peer(peer, count))
        time.sleep(seconds)
        return Around(idle, peak, peer.look(), took)


async def _burst_of_peer(peer: Peer, count: int) -> tuple[tuple[float, int], float]:
    began = time.monotonic()
    clients = min(PEER_CLIENTS, count)

    async def many() -> None:
        client = PeerClient(peer.port)
        for _ in range(count // clients):
            await client.run()
        await client.close()

    ending = asyncio.gather(*(many() for _ in range(clients)))
    peak = await _peak_until(ending, peer.look)
    await ending
    return peak, time.monotonic() - began


async def _peak_until(
    ending: asyncio.Future[Any], look: Callable[[], tuple[float, int]]
) -> tuple[float, int]:
    peak = (0.0, 0)
    while not ending.done():
        peak = max(peak, await asyncio.to_thread(look))
        await asyncio.wait([ending], timeout=SAMPLE_SECONDS)
    return peak


def _look(home: str) -> tuple[float, int]:
    """PSS in MB and the number of processes, of the daemon and all below it."""
    with contextlib.suppress(psutil.Error):  # one of them ended while we looked
        sizes = measure_pss(ApiClient(home).pid)
        return sum(size for _, size in sizes) / MEGABYTE, len(sizes)
    return 0.0, 0


async def _burst(home: str, count: int) -> tuple[tuple[float, int], float]:
    """Submit everything, look on until all have ended; the peak, and how long it took."""
    began = time.monotonic()
    client = ApiClient(home)
    names = [f"burst-{number}" for number in range(count // 2)]
    ids = []
    for name in names:
        ids.append(await client.submit("launch", {"source": "echo", "name": name}))
        ids.append(await client.submit("check", {}))
    ending = asyncio.gather(*(_ended(home, request_id) for request_id in ids))
    peak = await _peak_until(ending, lambda: _look(home))
    states = await ending
    seconds = time.monotonic() - began
    assert set(states) == {"SUCCEEDED"}, {state: states.count(state) for state in states}
    downs = [await client.submit("down", {"name": name}) for name in names]
    await asyncio.gather(*(_ended(home, request_id) for request_id in downs))
    await client.close()
    return peak, seconds


async def _ended(home: str, request_id: str) -> str:
    client = ApiClient(home)
    request = await client.wait(request_id)
    await client.close()
    return str(request["state"])


if __name__ == "__main__":
    main()
