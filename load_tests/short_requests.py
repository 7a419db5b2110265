# SPDX-License-Identifier: Apache-2.0
"""A SHORT request through HTTP, queue and worker: one at a time, and from 50 clients at once.

The request is `probe` of a running environment: it is queued, runs in a worker, and asks the
environment's `/health`. It takes two calls: submit, and wait for the end (pushed, not polled).
"Cold" is the first burst of a fresh daemon, "warm" the next one.

With `--peer skypilot` (skypilot_peer.py), SkyPilot takes turns with ours; its request is `status`,
the cheapest it has.

Aims: p50 under 5 ms and p99 under 20 ms; over 500 a second with 50 clients; start to healthy under
0.5 s.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from load_tests.peers.skypilot_peer import (
    PEER_OPTION,
    SETTLE_SECONDS,
    SKYPILOT,
    PeerClient,
    need,
    skypilot,
    started,
)
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import (
    OPENENV,
    Report,
    daemon,
    parse_arguments,
    percentile,
    run,
)

CLIENTS = 50
POLL_INTERVAL_SECONDS = 0.002
ZYGOTE_SECONDS = 1.0  # until the zygote's workers have started
SKYPILOT_COUNTS = (60, 200)  # requests one at a time, and in a burst: it is slow
OURS = "openenvd"

Key = tuple[str, str]  # name, unit

START = ("start to healthy (aim: 0.5)", "s")
P50 = ("one at a time, p50 (aim: 5)", "ms")
P99 = ("one at a time, p99 (aim: 20)", "ms")
COLD = (f"{CLIENTS} clients, cold", "req/s")
WARM = (f"{CLIENTS} clients, warm (aim: 500)", "req/s")
FLOOR_P50 = ("  floor: a bare call (health), p50", "ms")
FLOOR_P99 = ("  floor: a bare call (health), p99", "ms")


def main() -> None:
    """Start a new daemon, and then each peer anew, in each repetition."""
    options = parse_arguments(
        "Short requests.",
        repetitions=5,
        single={"type": int, "default": 300, "help": "requests one at a time"},
        burst={"type": int, "default": 2000, "help": "requests of all clients together"},
        peer=PEER_OPTION,
    )
    found: dict[str, dict[Key, list[float]]] = {}
    with skypilot(options.peer) as peer:
        for _ in range(options.repetitions):
            _note(found, OURS, _one_daemon(options.single, options.burst))
            if peer is not None:
                _note(found, SKYPILOT, _one_peer(peer, *SKYPILOT_COUNTS))
    report = Report("Short requests")
    ours = found.pop(OURS)
    for key, values in ours.items():
        others = {peer: theirs[key] for peer, theirs in found.items() if key in theirs}
        report.beside(*key, values, others, more_is_better=key[1] == "req/s")
    if SKYPILOT in found:
        report.note("Ours asks an environment over HTTP; the peer only reads a table.")
        single, burst = SKYPILOT_COUNTS
        report.note(f"{SKYPILOT} got {single} requests one at a time, and {burst} in each burst.")
    report.finish(options.json)


def _note(found: dict[str, dict[Key, list[float]]], name: str, measured: dict[Key, float]) -> None:
    for key, value in measured.items():
        found.setdefault(name, {}).setdefault(key, []).append(value)


class Probing:
    """Our client, whose requests are probes."""

    def __init__(self, home: str) -> None:
        self._api = ApiClient(home)
        self.close = self._api.close

    async def run(self) -> None:
        request = await self._api.run("probe", {"name": "probed"})
        assert request["state"] == "SUCCEEDED", request["error"]

    async def health(self) -> None:
        await self._api.call("GET", "/v1/health")


def _one_daemon(single: int, burst: int) -> dict[Key, float]:
    healthy = asyncio.run(_start_by_hand())
    with daemon(is_started=False) as environ:
        up = run([OPENENV, "up"], environ).seconds
        time.sleep(ZYGOTE_SECONDS)
        run([OPENENV, "launch", "echo", "--name", "probed"], environ)
        probing = partial(Probing, environ["OPENENV_HOME"])
        measured = asyncio.run(_measure(probing, single, burst))
    return {
        START: healthy,
        ("`openenv up`, the whole command", "s"): up,
        **measured,
    }


async def _start_by_hand() -> float:
    """Return the seconds from the start of the daemon to its first answer, as for peers."""
    with tempfile.TemporaryDirectory(prefix="openenvd-load-") as home:
        environ = {**os.environ, "OPENENV_HOME": home, "OPENENV_PORT": "0"}
        began = time.perf_counter()
        command = [sys.executable, "-P", "-m", "openenvd.server"]
        with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
            while not (Path(home) / "daemon.json").exists():
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
            client = ApiClient(home)
            await client.call("GET", "/v1/health")
            seconds = time.perf_counter() - began
            await client.close()
            process.terminate()
    return seconds


Client = Probing | PeerClient


async def _measure(make: Callable[[], Client], single: int, burst: int) -> dict[Key, float]:
    """Measure one request at a time by one client, and bursts before and after that."""
    client = make()

    async def many(count: int) -> None:
        client = make()
        await _repeat(client.run, count)
        await client.close()

    cold = await _burst(many, burst)
    waits = await _repeat(client.run, single)
    health = await _repeat(client.health, single)
    warm = await _burst(many, burst)
    await client.close()
    return {
        P50: percentile(waits, 0.50),
        P99: percentile(waits, 0.99),
        COLD: cold,
        WARM: warm,
        FLOOR_P50: percentile(health, 0.50),
        FLOOR_P99: percentile(health, 0.99),
    }


def _one_peer(command: list[str], single: int, burst: int) -> dict[Key, float]:
    with started(command) as peer:
        healthy = need(peer).seconds
        time.sleep(SETTLE_SECONDS)
        measured = asyncio.run(_measure(partial(PeerClient, peer.port), single, burst))
    return {START: healthy, **measured}


async def _repeat(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Return how long each call took, in ms."""
    waits = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        waits.append((time.perf_counter() - began) * 1000)
    return waits


async def _burst(many: Callable[[int], Awaitable[None]], count: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(many(count // CLIENTS) for _ in range(CLIENTS)))
    return count // CLIENTS * CLIENTS / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
