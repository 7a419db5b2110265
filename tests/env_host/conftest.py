# SPDX-License-Identifier: Apache-2.0
"""Real env hosts as child processes; none of them, nor a child of theirs, survives its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.schema.protocol import HostConfig

from .hosts import Host, wait_until_exited
from .samples import PLAIN, SAMPLES, THREADED

ECHO = "openenvd.env_host.bundled.echo.environment:EchoEnvironment"

StartHost = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartHost]:
    """Starts a host of a class in `samples.py`, of a bundled one, or of apps; one shard, unless
    said otherwise, and clients do not wait for a slot."""
    hosts: list[Host] = []
    (tmp_path / "samples.py").write_text(SAMPLES)
    (tmp_path / "threaded.py").write_text(THREADED)
    (tmp_path / "plain.py").write_text(PLAIN)

    def start_host(
        what: str | None = "Counter", *, env: dict[str, str] | None = None, **config: Any
    ) -> Host:
        reference = what if what is None or ":" in what else f"samples:{what}"
        fields = {
            "name": "sample", "env_class": reference, "import_paths": (str(tmp_path),),
            "shards": 1, "admission_timeout_seconds": 0.0,
        }  # fmt: skip
        where = {key: config.pop(key) for key in ("listener", "gate_fd", "python") if key in config}
        host = Host(HostConfig(**{**fields, **config}), tmp_path, env=env, **where)
        hosts.append(host)
        return host

    yield start_host
    families = [child for host in hosts for child in _children(host)]
    for host in hosts:
        host.close()
    wait_until_exited(families)  # the kernel kills the children of a killed host


@pytest.fixture
def serve(start: StartHost) -> StartHost:
    """Starts a host as `start` does, and waits until it is ready."""

    def start_and_wait(*what: str | None, **config: Any) -> Host:
        host = start(*what, **config)
        host.ready()
        return host

    return start_and_wait


def _children(host: Host) -> list[psutil.Process]:
    try:
        return psutil.Process(host.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
