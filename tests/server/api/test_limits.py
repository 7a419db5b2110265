# SPDX-License-Identifier: Apache-2.0
"""A real daemon, and strangers on its TCP port and its Unix socket."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.client import daemon, following
from openenvd.schema.settings import Paths
from openenvd.system.net.connection_limit import (
    MAX_CONNECTIONS,
    MIN_CONNECTIONS,
    connections_within,
)
from openenvd.system.text.units import MB

from ..conftest import WAIT_SECONDS

FEW_FDS = 300
STRANGERS = 400

Json = dict[str, Any]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Paths]:
    paths = Paths(tmp_path / "home")
    script = (
        "import resource; from openenvd.client import daemon;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_FDS // 2}, {FEW_FDS}));"
        "daemon.connect(settings={'port': 0})"
    )
    environ = {**os.environ, "OPENENV_HOME": str(paths.home)}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=WAIT_SECONDS)
    yield paths
    daemon.stop(paths)


def identity(paths: Paths) -> Json:
    read: Json = json.loads(paths.daemon_file.read_text())
    return read


def connect(paths: Paths) -> socket.socket:
    return socket.create_connection(("127.0.0.1", identity(paths)["port"]), WAIT_SECONDS)


def head_of(paths: Paths, request: str, **headers: str) -> bytes:
    headers |= {"Host": "localhost", "Authorization": f"Bearer {paths.token.read_text().strip()}"}
    lines = [f"{request} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def healthy(paths: Paths) -> bool:
    """Whether the daemon answers over TCP, too, to one that sends its request at once."""
    with connect(paths) as peer:
        peer.sendall(head_of(paths, "GET /v1/health", Connection="close"))
        return peer.recv(100).startswith(b"HTTP/1.1 200")


def test_endless_bodies_are_refused_and_workers_have_no_such_limit(home: Paths) -> None:
    process = psutil.Process(identity(home)["pid"])
    before = process.memory_info().rss
    with connect(home) as peer:
        peer.sendall(b"GET /v1/requests HTTP/1.1\r\nHost: localhost\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                peer.sendall(b"x" * MB)
        assert healthy(home)
        assert peer.recv(100).startswith(b"HTTP/1.1 431")
    assert process.memory_info().rss - before < 20 * MB
    with connect(home) as peer:
        peer.sendall(head_of(home, "POST /v1/requests", **{"Content-Length": str(6 << 30)}))
        assert peer.recv(100).startswith(b"HTTP/1.1 413")
    assert process.rlimit(resource.RLIMIT_NOFILE) == (FEW_FDS, FEW_FDS)
    [zygote] = process.children()
    assert zygote.rlimit(resource.RLIMIT_NOFILE) == (FEW_FDS // 2, FEW_FDS)
    zygote.kill()
    client = daemon.find(home)
    assert client is not None
    done = following.wait(lambda: client, client.submit("check", {})["id"])
    assert done["state"] == "SUCCEEDED"
    [successor] = process.children()
    assert successor.pid != zygote.pid
    assert successor.rlimit(resource.RLIMIT_NOFILE) == (FEW_FDS // 2, FEW_FDS)


@pytest.mark.parametrize("kind", [socket.AF_INET, socket.AF_UNIX])
def test_silent_strangers_do_not_keep_the_owner_out(
    home: Paths, kind: socket.AddressFamily
) -> None:
    told = identity(home)
    address = told["socket"] if kind == socket.AF_UNIX else ("127.0.0.1", told["port"])
    with contextlib.ExitStack() as stack:
        for _ in range(STRANGERS):
            stranger = stack.enter_context(socket.socket(kind))
            stranger.connect(address)
        client = daemon.find(home)
        assert client is not None
        assert client.status()["daemon"]["pid"] == told["pid"]
        assert healthy(home)
        fds = psutil.Process(told["pid"]).num_fds()
        assert connections_within(FEW_FDS, shares=4) < fds < FEW_FDS


@pytest.mark.parametrize(
    ("fds", "most"),
    [(-1, MAX_CONNECTIONS), (10, MIN_CONNECTIONS), (300, 86), (10**6, MAX_CONNECTIONS)],
)
def test_connections_leave_a_reserve_of_descriptors(fds: int, most: int) -> None:
    assert connections_within(fds, shares=2) == most
