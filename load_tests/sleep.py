# SPDX-License-Identifier: Apache-2.0
"""What an environment that sleeps holds, and how long its first client waits.

    python -m load_tests.sleep --repetitions 100 [--ways direct gateway docker]

The bundled `echo`, directly, behind the gateway, and in a container behind it, on a dockerd of its
own. Each repetition waits until it is asleep, measures the PSS of its processes, and times one
client: from its connect to the answer to its first reset; then another one, which finds it awake.
Of a container, what Docker holds for it counts, too. Aims: asleep the shim is all there is, or
nothing at all, and nobody waits for half a second where no container is started.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import psutil
from websockets.asyncio.client import connect

from load_tests.failover import own_engine
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
WAYS: dict[str, list[str]] = {
    "direct": [],
    "gateway": ["--gateway"],
    "docker": ["--gateway", "--provider", "docker"],
}


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


def replica_bytes(home: str, name: str) -> float:
    """The PSS of all processes of an environment, its shim or Docker's among them, in MB."""
    run_file = next(Path(home).glob(f"run/{name}-*/replica.json"))
    if (shim := json.loads(run_file.read_text()).get("shim")) is not None:
        top = psutil.Process(shim["pid"])
    else:
        pid = json.loads(run_file.with_name("status.json").read_text())["pid"]
        if pid is None:
            return 0.0
        parent = psutil.Process(pid).parent()
        assert parent is not None  # containerd's shim
        top = parent
    return sum(size for _, size in measure_pss(top.pid)) / MEGABYTE


async def measure(report: Report, environ: dict[str, str], name: str, repetitions: int) -> None:
    """All repetitions with one environment, and as many that find it awake."""
    home = environ["OPENENV_HOME"]
    api, found = ApiClient(home), openenv(environ, "address", name)
    address = found["address"]
    figures: dict[str, list[float]] = {key: [] for key in ("asleep", "awake", "wake", "warm")}
    for _ in range(repetitions):
        await until_asleep(api, name)
        figures["asleep"].append(replica_bytes(home, name))
        figures["wake"].append(await first_answer(address))
        figures["warm"].append(await first_answer(address))
        figures["awake"].append(replica_bytes(home, name))
    await api.close()
    report.add(f"{name}: PSS asleep", "MB", figures["asleep"])
    report.add(f"{name}: PSS after a session", "MB", figures["awake"])
    for key, how in (("wake", "asleep"), ("warm", "awake")):
        report.add(f"{name}: connect to first answer, {how}", "ms", figures[key])
        report.add("  P99", "ms", [percentile(figures[key], 0.99)])


def main() -> int:
    """Measure it in each way."""
    ways = {"nargs": "*", "choices": list(WAYS), "default": ["direct", "gateway"]}
    options = parse_arguments(__doc__ or "", 20, ways=ways)
    report = Report("An environment that sleeps, and wakes")
    for name in options.ways:
        with own_engine("docker" if name == "docker" else "local"), daemon() as environ:
            sleep = ["--idle-timeout", IDLE_SECONDS, "--name", name, "--shards", "1"]
            openenv(environ, "launch", "echo", *sleep, *WAYS[name])
            asyncio.run(measure(report, environ, name, options.repetitions))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
