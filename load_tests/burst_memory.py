# SPDX-License-Identifier: Apache-2.0
"""PSS of everything: idle, at the peak of a burst of 200 requests, and 30 s after it.

The burst is 100 `launch` of `echo` beside 100 `check`, all submitted at once; the environments are
taken down again, so that what is left is the daemon's own. Between two samples the peak may have
been higher. Aim: within 20 MB of idle 30 s after. Measured elsewhere: SkyPilot kept 3 GB (its own
report), 1.4 GB in 24 processes (0.9) or 7.9 GB in 62 (0.14.1) after 50 clients at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import psutil

from load_tests.api_client import ApiClient
from load_tests.idle_memory import MEGABYTE, measure_pss
from load_tests.report import Report, daemon, parse_arguments

AIM_MB = 20
SETTLE_SECONDS = 2.0
SAMPLE_SECONDS = 0.5


def main() -> None:
    """A fresh daemon for each repetition."""
    options = parse_arguments(
        "Memory of a burst.",
        repetitions=3,
        requests={"type": int, "default": 200},
        seconds={"type": float, "default": 30.0, "help": "from the burst's end to the last look"},
    )
    found: dict[str, list[float]] = {}
    counts: dict[str, list[float]] = {}
    took = []
    for _ in range(options.repetitions):
        with daemon() as environ:
            home = environ["OPENENV_HOME"]
            time.sleep(SETTLE_SECONDS)
            idle = _look(home)
            peak, seconds = asyncio.run(_burst(home, options.requests))
            time.sleep(options.seconds)
            after = _look(home)
        took.append(seconds)
        for name, (size, processes) in {"idle": idle, "peak": peak, "after": after}.items():
            found.setdefault(name, []).append(size)
            counts.setdefault(name, []).append(processes)
    report = Report(f"PSS of everything around a burst of {options.requests} requests")
    before = report.add("idle", "MB", found["idle"])
    report.add("peak", "MB", found["peak"])
    later = report.add(f"{options.seconds:g} s after", "MB", found["after"])
    kept = [b - a for a, b in zip(before.values, later.values, strict=True)]
    report.add(f"  kept (aim: {AIM_MB})", "MB", kept)
    for name, values in counts.items():
        report.add(f"processes, {name}", "", values)
    report.add("the burst took", "s", took)
    report.finish(options.json)


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
    peak = (0.0, 0)
    while not ending.done():
        peak = max(peak, await asyncio.to_thread(_look, home))
        await asyncio.wait([ending], timeout=SAMPLE_SECONDS)
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
