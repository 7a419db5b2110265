# SPDX-License-Identifier: Apache-2.0
"""A SHORT request through HTTP, queue and worker: one at a time, and from 50 clients at once.

The request is `probe` of a running environment: it is queued, runs in a worker, and asks the
environment's `/health`. Two calls each: submit, and wait for the end (pushed, not polled).
"Cold" is the first burst of a fresh daemon, "warm" the next one.

Aims: p50 under 5 ms and p99 under 20 ms; over 500 a second with 50 clients; start to healthy under
0.5 s; idle PSS of everything under 80 MB. Measured elsewhere, on a quiet 4-core machine, as the
rival cannot be installed everywhere: SkyPilot 0.9 / 0.14.1 108 / 94 ms at p50 and 209 / 177 ms at
p99, 72 / 7 a second cold and 120 / 17 warm, 0.8-1.1 / 4.9-5.6 s to healthy, 138 / 933 MB idle.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time

from load_tests.api_client import ApiClient
from load_tests.idle_memory import MEGABYTE, measure_pss
from load_tests.report import OPENENV, Report, parse_arguments, percentile, run

CLIENTS = 50


def main() -> None:
    """A fresh daemon for each repetition."""
    options = parse_arguments(
        "Short requests.",
        repetitions=5,
        single={"type": int, "default": 300, "help": "requests one at a time"},
        burst={"type": int, "default": 2000, "help": "requests of all clients together"},
    )
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.repetitions):
        for key, value in _one_daemon(options.single, options.burst).items():
            found.setdefault(key, []).append(value)
    report = Report("Short requests")
    for (name, unit), values in found.items():
        report.add(name, unit, values)
    report.note("SkyPilot's figures (measured elsewhere) stand in this program's docstring.")
    report.finish(options.json)


def _one_daemon(single: int, burst: int) -> dict[tuple[str, str], float]:
    with tempfile.TemporaryDirectory(prefix="openenvd-load-") as home:
        environ = {**os.environ, "OPENENV_HOME": home, "OPENENV_PORT": "0"}
        loading = run([OPENENV, "--version"], environ).seconds
        started = run([OPENENV, "up"], environ).seconds
        try:
            idle = _pss(home)
            run([OPENENV, "launch", "echo", "--name", "probed"], environ)
            measured = asyncio.run(_measure(home, single, burst))
            after = _pss(home)
        finally:
            for words in (["down", "--all"], ["stop"]):
                subprocess.run([OPENENV, *words], env=environ, check=False, capture_output=True)
    return {
        ("start to healthy, `openenv up` (aim: 0.5)", "s"): started,
        ("  of which loading the command line", "s"): loading,
        ("idle PSS of everything (aim: 80)", "MB"): idle,
        **measured,
        ("PSS of everything right after the bursts", "MB"): after,
    }


def _pss(home: str) -> float:
    time.sleep(1.0)  # the zygote's workers come up
    return sum(size for _, size in measure_pss(ApiClient(home).pid)) / MEGABYTE


async def _measure(home: str, single: int, burst: int) -> dict[tuple[str, str], float]:
    cold = await _burst(home, burst)
    client = ApiClient(home)
    waits = []
    for _ in range(single):
        began = time.perf_counter()
        await _probe(client)
        waits.append((time.perf_counter() - began) * 1000)
    health = []
    for _ in range(single):
        began = time.perf_counter()
        await client.call("GET", "/v1/health")
        health.append((time.perf_counter() - began) * 1000)
    await client.close()
    return {
        ("one at a time, p50 (aim: 5)", "ms"): percentile(waits, 0.50),
        ("one at a time, p99 (aim: 20)", "ms"): percentile(waits, 0.99),
        (f"{CLIENTS} clients, cold", "req/s"): cold,
        (f"{CLIENTS} clients, warm (aim: 500)", "req/s"): await _burst(home, burst),
        ("floor: a bare call (/v1/health), p50", "ms"): percentile(health, 0.50),
        ("floor: a bare call (/v1/health), p99", "ms"): percentile(health, 0.99),
    }


async def _burst(home: str, count: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_client(home, count // CLIENTS) for _ in range(CLIENTS)))
    return count // CLIENTS * CLIENTS / (time.perf_counter() - began)


async def _client(home: str, count: int) -> None:
    client = ApiClient(home)
    for _ in range(count):
        await _probe(client)
    await client.close()


async def _probe(client: ApiClient) -> None:
    request = await client.run("probe", {"name": "probed"})
    assert request["state"] == "SUCCEEDED", request["error"]


if __name__ == "__main__":
    main()
