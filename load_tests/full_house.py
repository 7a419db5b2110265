# SPDX-License-Identifier: Apache-2.0
"""Ten thousand queued SHORT requests beside a full house of LONG ones.

The LONG ones launch an environment whose import sleeps (`envs_for_load/`): a real launch, that
holds its worker. Then the SHORT ones (`probe` of a running environment) are submitted over several
connections, and while they run a process of its own asks `/v1/health`, which does nothing but wait
for its turn on the event loop. How late that loop is, the daemon measures itself.

Aims: loop lag p99 under 10 ms; no request lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import Report, daemon, parse_arguments, percentile

SUBMITTERS = 8
HOUSE = 200  # more than any plan lets run at once
ASK_EVERY_SECONDS = 0.01
CALM_SECONDS = 2.0
PROBES = 20
SLEEPY = "sleepy_environment:SleepyEnvironment"


def main() -> None:
    options = parse_arguments(
        "A full house.",
        repetitions=3,
        requests={"type": int, "default": 10_000},
        house={"type": int, "default": HOUSE, "help": "LONG requests"},
    )
    report = Report(f"{options.requests} SHORT requests beside {options.house} LONG ones")
    os.environ.setdefault("OPENENV_MAX_LONG_WORKERS", "16")
    os.environ["OPENENV_KEEP_REQUESTS"] = "1000000"
    for _ in range(options.repetitions):
        with daemon() as environ:
            measured = asyncio.run(
                _measure(environ["OPENENV_HOME"], options.requests, options.house)
            )
        for (name, unit), value in measured.items():
            report.append(name, unit, value)
    report.finish(options.json)


async def _measure(home: str, count: int, house: int) -> dict[tuple[str, str], float]:
    client = ApiClient(home)
    launched = await client.run("launch", {"source": "echo", "name": "probed"})
    assert launched["state"] == "SUCCEEDED", launched["error"]
    calm_until = time.monotonic() + CALM_SECONDS
    idle = await _ask(home, lambda: time.monotonic() > calm_until)
    long_ids = [await client.submit("launch", _sleepy(n)) for n in range(house)]
    await asyncio.sleep(1.0)
    into_full_house = [await _timed_probe(client) for _ in range(PROBES)]
    began = time.monotonic()
    over = _spawn.Event()
    answered = _spawn.Queue()
    asking = _spawn.Process(target=_ask_until, args=(home, over, answered))
    asking.start()
    share = count // SUBMITTERS
    shares = await asyncio.gather(*(_submit(home, share) for _ in range(SUBMITTERS)))
    ids = [request_id for part in shares for request_id in part]
    submitted = time.monotonic() - began
    await _all_ended(client)
    seconds = time.monotonic() - began
    loop = (await client.call("GET", "/v1/info"))["daemon"]["loop"]
    over.set()
    waits = await asyncio.to_thread(answered.get)
    asking.join()
    states = await _states(client, ids)
    running = await _states(client, long_ids)
    for request_id in long_ids:
        with contextlib.suppress(RuntimeError):
            await client.call("POST", f"/v1/requests/{request_id}/cancel")
    await asyncio.gather(*(_wait(home, request_id) for request_id in long_ids))
    await client.close()
    return {
        ("one SHORT request into the full house, p50", "ms"): statistics.median(into_full_house),
        ("API p50, /v1/health, idle", "ms"): percentile(idle, 0.50),
        ("API p99, /v1/health, idle", "ms"): percentile(idle, 0.99),
        ("API p50, /v1/health", "ms"): percentile(waits, 0.50),
        ("API p99, /v1/health", "ms"): percentile(waits, 0.99),
        ("loop lag p50 (over a minute at most)", "ms"): loop["p50_seconds"] * 1000,
        ("loop lag p99 (aim: 10)", "ms"): loop["p99_seconds"] * 1000,
        ("loop lag, longest", "ms"): loop["max_seconds"] * 1000,
        ("LONG requests running meanwhile", ""): running["RUNNING"],
        ("LONG requests waiting meanwhile", ""): running["PENDING"],
        ("accepted", "req/s"): len(ids) / submitted,
        ("SHORT, submitted to all ended", "req/s"): len(ids) / seconds,
        ("SHORT requests lost or failed (aim: 0)", ""): len(ids) - states["SUCCEEDED"],
    }


async def _timed_probe(client: ApiClient) -> float:
    began = time.perf_counter()
    request = await client.run("probe", {"name": "probed"})
    assert request["state"] == "SUCCEEDED", request["error"]
    return (time.perf_counter() - began) * 1000


_spawn = multiprocessing.get_context("spawn")  # its loop must not wait for ours


def _ask_until(home: str, over: Any, answered: Any) -> None:
    """In a process of its own: how long `/v1/health` takes, in ms, until `over`."""
    answered.put(asyncio.run(_ask(home, over.is_set)))


async def _ask(home: str, is_over: Callable[[], bool]) -> list[float]:
    waits = []
    client = ApiClient(home)
    while not is_over():
        began = time.perf_counter()
        await client.call("GET", "/v1/health")
        waits.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(ASK_EVERY_SECONDS)
    await client.close()
    return waits


async def _submit(home: str, count: int) -> list[str]:
    client = ApiClient(home)
    ids = [await client.submit("probe", {"name": "probed"}) for _ in range(count)]
    await client.close()
    return ids


async def _all_ended(client: ApiClient) -> None:
    """Until nothing SHORT is left; looked at rarely, so as not to be the load itself."""
    while True:
        path = "/v1/requests?operation=probe&state=PENDING&state=RUNNING&limit=1"
        if not (await client.call("GET", path))["requests"]:
            return
        await asyncio.sleep(0.25)


async def _states(client: ApiClient, ids: list[str]) -> Counter[str]:
    return Counter(
        [(await client.call("GET", f"/v1/requests/{i}"))["request"]["state"] for i in ids]
    )


async def _wait(home: str, request_id: str) -> None:
    client = ApiClient(home)
    await client.wait(request_id)
    await client.close()


def _sleepy(number: int) -> dict[str, object]:
    folder = str(Path(__file__).with_name("envs_for_load"))
    return {"source": SLEEPY, "name": f"sleepy-{number}", "cwd": folder}


if __name__ == "__main__":
    main()
