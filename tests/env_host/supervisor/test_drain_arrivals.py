# SPDX-License-Identifier: Apache-2.0
"""What a replica has accepted before it is drained is served, however little of it has arrived."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS
from ..raw import HEAD, raw


def has(process: psutil.Process, port: int) -> bool:
    """Whether a process has the connection of the client at this port."""
    return any(port in each.raddr[1:] for each in process.net_connections("tcp"))


def wait_until_accepted(host: psutil.Process, port: int) -> None:
    while not has(host, port):
        assert host.is_running()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("config", [{}, {"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_client_that_has_connected_gets_its_session(
    start: StartHost, tmp_path: Path, config: dict[str, Any], number: signal.Signals
) -> None:
    host = start(doors=f"{tmp_path}/", shares_address=True, **config)
    host.ready()
    with raw(host) as client:
        port = client.connection.getsockname()[1]
        while not any(has(shard, port) for shard in psutil.Process(host.process.pid).children()):
            assert host.process.poll() is None
        host.process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):  # it has looked several times by then
            host.process.wait(0.5)
        client.send(HEAD)
        assert b"101" in client.head()
        client.text('{"type": "reset"}')
        assert client.answer()["type"] == "observation"
    assert host.process.wait(WAIT_SECONDS) == 0


# Whose processes start as programs, and import it for themselves, the second time only when told.
SLOW_SHARDS = """
import os, threading, time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
threading.Thread(target=time.sleep, args=(3600.0,), daemon=True).start()
if os.path.exists("imported"):
    while not os.path.exists("go"):
        time.sleep(0.01)
open("imported", "w").close()

class Slow(EchoEnvironment):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_client_that_waits_for_the_first_shard_gets_its_session(
    start: StartHost, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_SHARDS)
    host = start("slow:Slow", doors=f"{tmp_path}/", shares_address=True)
    with raw(host) as client:
        client.send(HEAD)
        wait_until_accepted(psutil.Process(host.process.pid), client.connection.getsockname()[1])
        host.process.send_signal(number)
        host.note_that(draining=True)
        (tmp_path / "go").touch()
        assert b"101" in client.head()
        client.text('{"type": "reset"}')
        assert client.answer()["type"] == "observation"
    assert host.process.wait(WAIT_SECONDS) == 0


def test_one_that_nobody_waits_for_ends_at_once(start: StartHost, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_SHARDS)
    host = start("slow:Slow", doors=f"{tmp_path}/", shares_address=True)
    process = psutil.Process(host.process.pid)
    while not process.children():  # it imports
        assert host.process.poll() is None
    host.process.send_signal(signal.SIGUSR2)
    assert host.process.wait(WAIT_SECONDS) == 0
