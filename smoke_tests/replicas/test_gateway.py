# SPDX-License-Identifier: Apache-2.0
"""The gateway in front of local replicas: the real Envoy, upstream's real client, real deaths."""

import os
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from openenvd.client.errors import SessionError
from openenvd.client.session import Session
from openenvd.environments.gateway.process import locked
from openenvd.schema.layout import Layout

from ..conftest import Machine, eventually
from ..pages import name_of, pages_that_need, run_blocks


def launch(machine: Machine, name: str = "echo", *options: str) -> str:
    words = ["launch", "echo", "--name", name, "--gateway", *options, "--json"]
    address: str = machine.ok(*words).json["environment"]["address"]
    assert f"/envs/{name}" in address
    return address


def gateway(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = machine.ok("gateway", "status", "--json").json["gateway"]
    return found


def answers(address: str) -> bool:
    try:
        with Session(address) as session:
            session.reset()
        return True
    except SessionError:
        return False


def test_a_gateway_that_is_killed_comes_back_on_its_port_without_a_launch(machine: Machine) -> None:
    address = launch(machine)
    first = gateway(machine)
    with connect(f"ws{address.removeprefix('http')}/ws", open_timeout=30) as lost:
        os.kill(first["pid"], signal.SIGKILL)
        with pytest.raises(ConnectionClosedError, match="no close frame received or sent"):
            lost.recv(timeout=30)
    eventually(lambda: answers(address), within=10)
    assert gateway(machine)["address"] == first["address"]
    eventually(lambda: gateway(machine)["restarts"] == 1)
    assert f"ago Envoy (pid {first['pid']}) was killed by SIGKILL" in machine.ok("status").out
    shim = psutil.Process(gateway(machine)["pid"]).parent()
    assert shim is not None
    shim.kill()
    eventually(lambda: not shim.is_running() and answers(address), within=20)
    assert gateway(machine)["address"] == first["address"]
    said = machine.ok("status").out
    assert f"ended with its shim (pid {shim.pid}), which was killed or crashed" in said
    assert f"Envoy (pid {first['pid']}) was killed by SIGKILL" in said


def test_the_next_daemon_has_the_gateway_of_one_that_is_killed_in_a_step(machine: Machine) -> None:
    with Session(launch(machine)) as session:
        session.reset()
        first = gateway(machine)
        machine.kill_daemon()
        session.step({"message": "hello"})
        eventually(lambda: gateway(machine)["state"] == "READY")  # of the next daemon
        assert gateway(machine)["pid"] == first["pid"]
        session.step({"message": "hello"})


def test_the_gateway_ends_with_a_daemon_that_is_stopped_before_it_could_stop_it(
    machine: Machine,
) -> None:
    launch(machine)
    pid, daemon = gateway(machine)["pid"], machine.status()["daemon"]["address"]
    with locked(Layout(machine.home)):
        machine.ok("down", "echo")
        stopped = machine.start("stop")
        eventually(lambda: not is_listening(daemon))
        time.sleep(1)  # until it has ended its tasks, which cannot be seen from outside
        assert psutil.pid_exists(pid)
    assert stopped.wait(60) == 0
    assert not psutil.pid_exists(pid)


def is_listening(address: str) -> bool:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("page", pages_that_need("a certificate"), ids=name_of)
def test_the_blocks_of_a_page_that_need_a_certificate_run(machine: Machine, page: Path) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    names = {name: str(machine.home.parent / name) for name in ("chain.pem", "key.pem")}
    files = ["-out", names["chain.pem"], "-keyout", names["key.pem"]]
    subprocess.run([*make, *files], check=True, capture_output=True)
    run_blocks(machine, page, "a certificate", {"0.0.0.0": "127.0.0.1", **names})
    address = machine.environment("my_env")["address"]
    assert address.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=names["chain.pem"])
    trusting.check_hostname = False  # the name is not the address
    with urlopen(f"{address}/health", context=trusting) as response:
        assert response.status == 200
