# SPDX-License-Identifier: Apache-2.0
"""A home of its own, and a fake daemon in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.client import daemon
from openenvd.client.api import DaemonClient
from openenvd.schema.settings import Paths

from .fake_daemon import FakeDaemon, serving


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path / "home"))
    made = Paths.from_environment()
    made.home.mkdir()
    return made


@pytest.fixture
def fake(paths: Paths) -> Iterator[FakeDaemon]:
    with serving(paths) as made:
        yield made


@pytest.fixture
def client(fake: FakeDaemon) -> DaemonClient:
    return daemon.connect(fake.paths)
