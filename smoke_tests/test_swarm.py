# SPDX-License-Identifier: Apache-2.0
"""Environments whose replicas are services of a swarm: the real command, daemon, agent, dockerd."""

from __future__ import annotations

from typing import Any

from openenvd.environments import run_files
from openenvd.environments.layout import Layout
from openenvd.shim.client import ShimClient

from .conftest import Machine, eventually
from .docker_engine import DockerEngine
from .test_docker import launched, say_hello


def test_a_service_serves_is_replaced_when_it_is_killed_and_goes_with_its_environment(
    machine: Machine, swarm_engine: DockerEngine
) -> None:
    machine.environ["DOCKER_HOST"] = swarm_engine.host
    environment = launched(machine, "echo", "--provider", "swarm", "--memory", "256M")
    say_hello(environment["address"])
    [run_file] = run_files.all_of(Layout(machine.home).runs)
    problems = []

    def is_ready_again(status: dict[str, Any]) -> bool:
        problems.append(status["problem"])
        return bool(status["generation"] == 2 and status["state"] == "ready")

    with ShimClient.connect(run_file.socket_path) as client:
        swarm_engine.docker("kill", *swarm_engine.docker("ps", "--quiet").split())
        client.wait(is_ready_again, 60)
    assert set(problems) == {None}  # Swarm only says how far it is
    eventually(lambda: machine.environment("echo")["replicas"][0]["restarts"] == 1, within=60)
    eventually(lambda: machine.environment("echo")["state"] == "READY", within=60)
    say_hello(environment["address"])
    eventually(lambda: machine.ok("logs", "echo").out.count("listening on") >= 2)
    assert machine.ok("logs", "echo").out.count("listening on") == 2
    machine.ok("down", "echo")
    assert swarm_engine.docker("service", "ls", "--quiet") == ""
    assert swarm_engine.docker("ps", "--all", "--quiet") == ""
