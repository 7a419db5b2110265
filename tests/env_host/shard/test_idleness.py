# SPDX-License-Identifier: Apache-2.0
"""A host that nobody uses exits, and says so; what connects meanwhile is left to the next one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host

SHORT = 0.05  # seconds without use


def slept(host: Host) -> int:
    host.note_that(sleeps=True)
    return host.process.wait(WAIT_SECONDS)


@pytest.mark.parametrize("config", [{}, {"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_host_sleeps_after_its_last_session(serve: StartHost, config: dict[str, Any]) -> None:
    host = serve(sleep_after_seconds=1.0, **config)
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
    assert slept(host) == 0


def test_a_session_keeps_a_host_awake(serve: StartHost) -> None:
    host = serve(sleep_after_seconds=SHORT)
    with host.open() as client:
        for _ in range(20):
            answer = client.ask("reset")
            assert answer["type"] == "observation", answer
            client.connection.ping().wait(SHORT)
        host.note_that(sessions=1)
        assert host.process.poll() is None
    assert slept(host) == 0


def test_a_replica_with_others_at_its_address_stays_awake(serve: StartHost, tmp_path: Path) -> None:
    other = tmp_path / "trial-1.door"
    other.touch()
    host = serve(sleep_after_seconds=SHORT, doors=f"{tmp_path}/trial-", shares_address=True)
    time.sleep(10 * SHORT)
    assert host.process.poll() is None
    other.unlink()
    assert slept(host) == 0
