# SPDX-License-Identifier: Apache-2.0
"""The brigade served by so many shards, or by one process; and its singers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.peers.brigade_singers import PACKET_SECONDS, WARM_UP_PACKETS
from load_tests.peers.scaling_servers import Arrangement, openenvd_of
from load_tests.shared.report import percentile
from openenvd.rollouts.bench.target import Target, cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
SHARED = "openenvd.env_host.bundled.brigade.environment:BrigadeEnvironment"
ALONE = "load_tests.envs_for_load.brigade_alone:BrigadeAlone"
MAX_SESSIONS = 8192


@dataclass(frozen=True)
class Trial:
    """What singers of one population saw."""

    singers: int
    packets: int
    p50_seconds: float
    p99_seconds: float
    misses: int
    heard: int
    server_cores: float  # used, of all the server's processes
    singers_cores: float

    @property
    def is_clean(self) -> bool:
        """Whether nobody had a gap."""
        return self.misses == 0

    def sentence(self, name: str) -> str:
        """For people who wait."""
        return (
            f"  {name}: {self.singers} singers, p50 {self.p50_seconds * 1000:.0f} ms, "
            f"p99 {self.p99_seconds * 1000:.0f} ms, {self.misses} of {self.packets} missed, "
            f"{self.server_cores:.2f} + {self.singers_cores:.2f} cores"
        )


@contextmanager
def serve(shards: int | None) -> Iterator[Target]:
    """An environment with so many shards and a state process; None: all in one process."""
    arrangement = Arrangement(MAX_SESSIONS, 1, shards=str(shards or 1))
    with openenvd_of(arrangement, ALONE if shards is None else SHARED) as started:
        yield started.target


def sing(target: Target, count: int, seconds: float, processes: int = 2) -> Trial:
    """So many singers in real time, for so long after all of them are connected."""
    packets = WARM_UP_PACKETS + max(1, round(seconds / PACKET_SECONDS))
    processes = min(processes, count)
    with ExitStack() as stack:
        crews = []
        for number in range(processes):
            share = count // processes + (number < count % processes)
            crews.append(stack.enter_context(_crew(target.port, share, packets, leads=number == 0)))
            _line(crews[-1])  # the leader is there before anybody follows
        used = cpu_seconds(target)
        began = time.monotonic()
        for crew in crews:
            assert crew.stdin is not None
            crew.stdin.write(f"{began + 0.2}\n")
            crew.stdin.flush()
        found = [json.loads(_line(crew)) for crew in crews]
        cores = (cpu_seconds(target) - used) / (time.monotonic() - began)
    return _trial(count, found, cores, packets * PACKET_SECONDS)


def _trial(count: int, found: list[dict[str, Any]], cores: float, seconds: float) -> Trial:
    latencies = [latency for one in found for latency in one["latencies"]]
    faults = [fault for one in found for fault in one["faults"]]
    if faults:
        raise SystemExit(f"singers were answered with errors: {faults[:3]}")
    latencies = latencies or [seconds]  # overwhelmed: no answer but to the warm-up
    return Trial(
        singers=count,
        packets=sum(one["packets"] for one in found),
        p50_seconds=percentile(latencies, 0.50),
        p99_seconds=percentile(latencies, 0.99),
        misses=sum(one["misses"] for one in found),
        heard=max(one["heard"] for one in found),
        server_cores=cores,
        singers_cores=sum(one["cpu_seconds"] for one in found) / seconds,
    )


@contextmanager
def _crew(port: int, count: int, packets: int, *, leads: bool) -> Iterator[subprocess.Popen[str]]:
    words = [str(port), str(count), str(packets), "leads" if leads else "follows"]
    crew = subprocess.Popen(
        [sys.executable, "-m", "load_tests.peers.brigade_singers", *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with crew:
        try:
            yield crew
        finally:
            crew.kill()


def _line(crew: subprocess.Popen[str]) -> str:
    assert crew.stdout is not None
    line = crew.stdout.readline()
    if not line:
        raise SystemExit("the singers ended early; what they said is above")
    return line
