# SPDX-License-Identifier: Apache-2.0
"""What an environment that sleeps holds, and how long its first client waits.

    python -m load_tests.sleep --repetitions 100

The bundled `echo`. Each repetition waits until it is asleep, measures the PSS of its processes, and
times one client: from its connect to the answer to its first reset; then another one, which finds
it awake. Aims: asleep the shim is all there is, and nobody waits for half a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from websockets.asyncio.client import connect

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import (
    MEGABYTE,
    Report,
    daemon,
    measure_pss,
    parse_arguments,
    percentile,
)

IDLE_SECONDS = "0.5"
LOOK_SECONDS = 0.02
NAME = "echo"


async def first_answer(address: str) -> float:
    """Milliseconds from a client's connect to the answer to its reset."""
    started = time.perf_counter()
    async with connect(f"{address.replace('http', 'ws', 1)}/ws") as connection:
        await connection.send('{"type": "reset"}')
        assert json.loads(await connection.recv())["type"] == "observation"
        return (time.perf_counter() - started) * 1000


async def until_asleep(api: ApiClient, name: str) -> None:
    """Wait until an environment sleeps, and its server is gone."""
    while True:
        found = (await api.call("GET", f"/v1/environments/{name}"))["environment"]
        if found["state"] == "ASLEEP" and found["replicas"][0]["pid"] is None:
            return
        await asyncio.sleep(LOOK_SECONDS)


def replica_megabytes(home: str, name: str) -> float:
    """The PSS of all processes of an environment, its shim among them, in MB."""
    run_file = next(Path(home).glob(f"run/{name}-*/replica.json"))
    shim = json.loads(run_file.read_text())["shim"]
    return sum(size for _, size in measure_pss(shim["pid"])) / MEGABYTE


async def measure(report: Report, environ: dict[str, str], name: str, repetitions: int) -> None:
    """All repetitions with one environment, and as many that find it awake."""
    home = environ["OPENENV_HOME"]
    api, found = ApiClient(home), openenv(environ, "address", name)
    address = found["address"]
    figures: dict[str, list[float]] = {key: [] for key in ("asleep", "awake", "wake", "warm")}
    for _ in range(repetitions):
        await until_asleep(api, name)
        figures["asleep"].append(replica_megabytes(home, name))
        figures["wake"].append(await first_answer(address))
        figures["warm"].append(await first_answer(address))
        figures["awake"].append(replica_megabytes(home, name))
    await api.close()
    report.add(f"{name}: PSS asleep", "MB", figures["asleep"])
    report.add(f"{name}: PSS after a session", "MB", figures["awake"])
    for key, how in (("wake", "asleep"), ("warm", "awake")):
        report.add(f"{name}: connect to first answer, {how}", "ms", figures[key])
        report.add("  P99", "ms", [percentile(figures[key], 0.99)])


def main() -> int:
    """Measure it."""
    options = parse_arguments(__doc__ or "", 20)
    report = Report("An environment that sleeps, and wakes")
    with daemon() as environ:
        openenv(environ, "launch", NAME, "--idle-timeout", IDLE_SECONDS, "--shards", "1")
        asyncio.run(measure(report, environ, NAME, options.repetitions))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
