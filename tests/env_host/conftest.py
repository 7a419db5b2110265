# SPDX-License-Identifier: Apache-2.0
"""Real env hosts as child processes; none of them, nor a child of theirs, survives its test."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.schema.protocol import HostConfig

from ..environments.shim.conftest import cgroups as cgroups
from . import hosts
from .hosts import Host, wait_until_exited
from .samples import PLAIN, SAMPLES, THREADED
from .upstream import write_upstream

ECHO = "openenvd.env_host.bundled.echo.environment:EchoEnvironment"

StartHost = Callable[..., Host]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are programs of their own, with imports of their own."""
    monkeypatch.setattr(hosts, "FORKS", False)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartHost]:
    """Starts a host of a class in `samples.py`, of a bundled one, or of apps; one shard, unless
    said otherwise, and clients do not wait for a slot.

    `files` are texts of modules that are written before; `app` is that of `app.py`, which is served
    and may use a stand-in for upstream's package.
    """
    started: list[Host] = []
    write_files(tmp_path, {"samples.py": SAMPLES, "threaded.py": THREADED, "plain.py": PLAIN})

    def start_host(
        what: str | None = "Counter",
        *,
        app: str | None = None,
        files: Mapping[str, str] | None = None,
        env: dict[str, str] | None = None,
        **config: Any,
    ) -> Host:
        if app is not None:
            write_upstream(tmp_path)
            write_files(tmp_path, {"app.py": app})
            what, config = None, {"app_candidates": ("app:app",), **config}
        write_files(tmp_path, files or {})
        reference = what if what is None or ":" in what else f"samples:{what}"
        fields = {
            "name": "sample", "env_class": reference, "import_paths": (str(tmp_path),),
            "shards": 1, "admission_timeout_seconds": 0.0,
        }  # fmt: skip
        where = {key: config.pop(key) for key in ("listener", "gate_fd", "python") if key in config}
        host = Host(HostConfig(**{**fields, **config}), tmp_path, env=env, **where)
        started.append(host)
        return host

    yield start_host
    families = [child for host in started for child in _children(host)]
    for host in started:
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


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture(params=[False, True], ids=["shared", "isolated"])
def isolate(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


WAYS: list[dict[str, Any]] = [{}, {"shards": 2}, {"isolate": True, "max_sessions": 4}]


@pytest.fixture(params=WAYS, ids=["one shard", "two shards", "isolated"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each way to serve sessions."""
    return dict(request.param)


class Gate:
    """Meets a call inside the host: it says when it is there, and waits to be let go."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.name = name
        self._in, self._out = folder / f"{name}.in", folder / f"{name}.out"
        os.mkfifo(self._in)
        os.mkfifo(self._out)

    def reached(self) -> None:
        self._in.read_bytes()

    def open(self) -> None:
        self._out.write_bytes(b"")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def _children(host: Host) -> list[psutil.Process]:
    try:
        return psutil.Process(host.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
