# SPDX-License-Identifier: Apache-2.0
"""The brigade served by an env host with so many shards, or by one process; and its singers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from load_tests.peers.brigade_singers import PACKET_SECONDS, WARM_UP_PACKETS
from load_tests.shared.report import percentile
from openenvd.bench.target import Target, cpu_seconds
from openenvd.env_host.protocol import (
    HOST_CONFIG_VARIABLE,
    LISTEN_FD_VARIABLE,
    NOTIFY_FD_VARIABLE,
    HostConfig,
)

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "env_host" / "__main__.py"
SHARED = "openenvd.env_host.bundled.brigade.environment:BrigadeEnvironment"
ALONE = "load_tests.envs_for_load.brigade_alone:BrigadeAlone"
MAX_SESSIONS = 8192
READY_SECONDS = 60.0
STOP_SECONDS = 15.0


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
def serve(shards: int | None) -> Iterator[tuple[int, int]]:
    """Port and pid of a host with so many shards and a state process; None: all in one process."""
    config = HostConfig(
        name="brigade",
        env_class=ALONE if shards is None else SHARED,
        import_paths=(str(ROOT),),
        max_sessions=MAX_SESSIONS,
        shards=shards or 1,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    reading, writing = os.pipe()
    environ = {
        **os.environ,
        HOST_CONFIG_VARIABLE: json.dumps(config.to_json()),
        LISTEN_FD_VARIABLE: str(listener.fileno()),
        NOTIFY_FD_VARIABLE: str(writing),
    }
    with tempfile.TemporaryFile() as log, listener:
        host = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            env=environ,
            pass_fds=(listener.fileno(), writing),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        os.close(writing)
        try:
            _wait_until_ready(reading, log)
            yield listener.getsockname()[1], host.pid
        finally:
            _end(host)
            os.close(reading)


def sing(port: int, pid: int, count: int, seconds: float, processes: int = 2) -> Trial:
    """So many singers in real time, for so long after all of them are connected."""
    packets = WARM_UP_PACKETS + max(1, round(seconds / PACKET_SECONDS))
    processes = min(processes, count)
    target = Target("brigade", f"http://127.0.0.1:{port}", (pid,))
    with ExitStack() as stack:
        crews = []
        for number in range(processes):
            share = count // processes + (number < count % processes)
            crews.append(stack.enter_context(_crew(port, share, packets, leads=number == 0)))
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


def _wait_until_ready(reading: int, log: Any) -> None:
    told = b""
    while b'"ready"' not in told:
        is_readable = select.select([reading], [], [], READY_SECONDS)[0]
        data = os.read(reading, 65536) if is_readable else b""
        if not data:
            log.seek(0)
            raise SystemExit(f"the host did not start: {told!r}\n{log.read().decode()[-2000:]}")
        told += data


def _end(host: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(host.pid).children(recursive=True) if host.poll() is None else []
    host.send_signal(signal.SIGTERM)
    try:
        host.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        host.kill()
        host.wait()
    for child in family:
        if child.is_running():
            child.kill()
    psutil.wait_procs(family, STOP_SECONDS)
