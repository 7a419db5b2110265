# SPDX-License-Identifier: Apache-2.0
"""The peer of the executor: SkyPilot's local API server, with `--peer skypilot`.

The package from PyPI is in a Python of its own, which the folder `OPENENVD_PEER_VENV` + "-skypilot"
keeps between runs. A user's command starts it: `sky api start`. The server has a port and a home of
its own, and needs no network once installed. The request is `POST /status`, the cheapest one that
goes through queue and worker: it looks up clusters, and there are none. A request takes two calls:
submit, and `/api/get`, which answers at the end. Processes of a peer are found by its session,
because some outlive their parent, and are killed with it.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from load_tests.peers.scaling_servers import (
    PEER_VENV_VARIABLE,
    free_port,
    install_python,
)
from load_tests.shared.api_client import HttpClient
from load_tests.shared.report import MEGABYTE
from smoke_tests.background import start

REQUIREMENT = "skypilot==0.14.1"
SKYPILOT = "SkyPilot 0.14.1"
PEER_OPTION: dict[str, Any] = {
    "choices": ["skypilot"],
    "help": "also measure SkyPilot, which is installed if it is missing",
}
START_SECONDS = 120.0
SETTLE_SECONDS = 10.0  # a healthy server's workers still import for some time
CALL_SECONDS = 300.0
STOP_SECONDS = 10.0
POLL_INTERVAL_SECONDS = 0.01
FURTHER_PORTS = 4
# SkyPilot's queue has a fixed port, which another program's connection may already use.
PORT_TAKEN = "is already in use"
MAX_LINE_BYTES = 2**20
SUBMITTED = "x-skypilot-request-id"

Wrap = Callable[[list[str]], list[str]]


@dataclass
class Peer:
    """A peer that was started, whether or not it became healthy."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    seconds: float = 0.0  # to healthy
    is_healthy: bool = False

    def look(self) -> tuple[float, int]:
        """Return the PSS in MB and the number of its processes."""
        sizes = []
        for process in session_of(self.process.pid):
            with suppress(psutil.Error):  # it ended during the measurement
                sizes.append(process.memory_full_info().pss)
        return sum(sizes) / MEGABYTE, len(sizes)


@contextmanager
def skypilot(asked: str | None) -> Iterator[list[str] | None]:
    """Yield the command that starts its server if `--peer` names it, or else None."""
    if asked is None:
        yield None
        return
    kept = os.environ.get(PEER_VENV_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="openenvd-skypilot-") as made:
        sky = Path(f"{kept}-skypilot" if kept else made).absolute() / "bin" / "sky"
        if not sky.exists():
            install_python(sky.parents[1], REQUIREMENT)
        yield [str(sky), "api", "start", "--foreground"]


@contextmanager
def started(
    command: list[str], wrap: Wrap = list, patience_seconds: float = START_SECONDS
) -> Iterator[Peer]:
    """Start a new peer; `wrap` changes its command to one that runs inside a group."""
    with tempfile.TemporaryDirectory(
        prefix="openenvd-peer-home-", ignore_cleanup_errors=True
    ) as home:
        peer = _start(wrap(command), Path(home))
        try:
            _await(peer, patience_seconds)
            for _ in range(FURTHER_PORTS):
                if peer.is_healthy or PORT_TAKEN not in peer.log.read_text():
                    break
                _end(peer.process)
                peer = _start(wrap(command), Path(home))
                _await(peer, patience_seconds)
            yield peer
        finally:
            _end(peer.process)


def _start(command: list[str], home: Path) -> Peer:
    port, log = free_port(), home / "log"
    process = start(command, log, cwd=home, env=_environ(str(home), port))
    return Peer(process, port, log)


def _await(peer: Peer, patience_seconds: float) -> None:
    """Wait until it is healthy or has ended, or the time limit is reached."""
    began = time.monotonic()
    while not peer.is_healthy and peer.seconds < patience_seconds:
        if peer.process.poll() is not None:
            break
        time.sleep(POLL_INTERVAL_SECONDS)
        peer.is_healthy = answers(peer.port)
        peer.seconds = time.monotonic() - began


def need(peer: Peer) -> Peer:
    """Return the peer if it is healthy; otherwise end the program with the end of its log."""
    if not peer.is_healthy:
        raise SystemExit(f"{SKYPILOT} did not start:\n{peer.log.read_text()[-2000:]}")
    return peer


def answers(port: int, patience_seconds: float = 2.0) -> bool:
    """Return whether it answers that it is healthy."""
    url = f"http://127.0.0.1:{port}/api/health"
    with suppress(OSError, HTTPException), urlopen(url, timeout=patience_seconds) as answer:
        return b"healthy" in answer.read()
    return False


class PeerClient(HttpClient):
    """A persistent connection to a peer."""

    def __init__(self, port: int) -> None:
        super().__init__(partial(asyncio.open_connection, "127.0.0.1", port, limit=MAX_LINE_BYTES))

    async def submit(self) -> str:
        headers, _ = await self._call("POST", "/status", b'{"summary_response": true}')
        return headers[SUBMITTED]

    async def wait(self, request_id: str) -> None:
        _, content = await self._call("GET", f"/api/get?request_id={request_id}")
        status = json.loads(content)["status"]
        if status != "SUCCEEDED":
            raise RuntimeError(f"request {request_id} is {status}")

    async def run(self) -> None:
        await self.wait(await self.submit())

    async def health(self) -> None:
        """Make a call that does nothing, which is the floor."""
        await self._call("GET", "/api/health")

    async def _call(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[dict[str, str], bytes]:
        async with asyncio.timeout(CALL_SECONDS):
            return await self.exchange(method, path, body)


def session_of(pid: int) -> list[psutil.Process]:
    """List the living processes of the session that `pid` leads."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == pid and _is_alive(process):
                found.append(process)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the peer and its session at once: how peers end is not measured."""
    deadline = time.monotonic() + STOP_SECONDS
    while family := _all_of(process):
        for one in family:
            with suppress(psutil.Error):
                one.kill()
        process.poll()  # otherwise it stays in its session as a zombie
        psutil.wait_procs(family, timeout=0.2)
        if time.monotonic() > deadline:
            raise SystemExit(f"processes of a peer do not end: {family}")
    process.wait(STOP_SECONDS)


def _all_of(process: subprocess.Popen[bytes]) -> set[psutil.Process]:
    family = {*session_of(process.pid)}
    with suppress(psutil.Error):
        family.update(psutil.Process(process.pid).children(recursive=True))
    return {one for one in family if _is_alive(one)}


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _environ(home: str, port: int) -> dict[str, str]:
    """Return an environment without the user's cloud credentials, and without telemetry."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "SKYPILOT_API_SERVER_LOCAL_PORT": str(port),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
