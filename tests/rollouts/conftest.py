# SPDX-License-Identifier: Apache-2.0
"""Real env hosts that serve the environments of `worlds.py`."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.schema.protocol import HostConfig

from ..env_host.hosts import Host
from .worlds import WORLDS

Serve = Callable[..., Host]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a host of a class in `worlds.py`, or of `module:Class`, in a folder of its own."""
    hosts: list[Host] = []

    def start(what: str = "Walk", *, max_sessions: int | None = None, **config_fields: Any) -> Host:
        folder = tmp_path / f"host-{len(hosts)}"
        folder.mkdir()
        (folder / "worlds.py").write_text(WORLDS)
        reference = what if ":" in what else f"worlds:{what}"
        config = HostConfig(
            name="world",
            env_class=reference,
            import_paths=(str(folder),),
            max_sessions=max_sessions,
            **config_fields,
        )
        hosts.append(Host(config, folder))
        hosts[-1].ready()
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture
def unused_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def address_of(host: Host) -> str:
    return f"http://127.0.0.1:{host.port}"


def lines_of(host: Host, name: str) -> list[str]:
    path = host.log.parent / name
    return path.read_text().splitlines() if path.exists() else []
