# SPDX-License-Identifier: Apache-2.0
"""Environments whose replicas are containers: the real command, daemon, agent and dockerd."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from ..conftest import REPOSITORY, Machine, eventually, smoke_cache
from ..pages import name_of, pages_that_need, run_blocks
from .docker_engine import DockerEngine, base_image
from .docker_engine import docker_engine as running_engine

COUNTING = """
FROM python:3.11-slim
RUN mkdir -p /srv && echo '{"status": "healthy"}' > /srv/health
WORKDIR /srv
CMD python3 -m http.server 8000 >/dev/null 2>&1 & \\
    python3 -uc "import itertools, time; [(print(n), time.sleep(0.02)) for n in itertools.count()]"
"""
KILLS = 20  # of the agent, one after another
FOREIGN = """
FROM python:3.11-slim
RUN mkdir -p /srv && echo '{"status": "healthy"}' > /srv/health
WORKDIR /srv
CMD python3 -u -m http.server 8000
"""


def say_hello(address: str) -> None:
    hello = [sys.executable, str(REPOSITORY / "smoke_tests" / "say_hello.py"), address]
    subprocess.run(hello, check=True, capture_output=True, text=True)


def launched(machine: Machine, *words: str, cwd: Path | None = None) -> dict[str, Any]:
    answer = machine.ok("launch", *words, "--json", timeout=300, cwd=cwd).json
    environment: dict[str, Any] = answer["environment"]
    return environment


def containers(engine: DockerEngine) -> list[str]:
    return engine.docker("ps", "--all", "--quiet", "--filter", "label=openenvd.home").split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("kill", "--signal=TERM"), "SIGTERM was sent through Docker"),
        (("kill",), "docker kill"),
        (("rm", "--force"), "docker"),
    ],
)
def test_what_is_done_to_a_container_through_docker_is_told(
    docker_machine: Machine, docker_engine: DockerEngine, words: tuple[str, ...], expected: str
) -> None:
    machine = docker_machine
    launched(machine, "echo", "--provider", "docker")
    [container] = containers(docker_engine)
    docker_engine.docker(*words, container)
    eventually(lambda: machine.environment("echo")["replicas"][0]["restarts"] == 1, within=60)
    message = machine.environment("echo")["replicas"][0]["message"]
    assert expected in message
    assert "not watched" not in message
    assert "memory" not in message


def test_an_image_of_others_is_launched_by_its_name(
    docker_machine: Machine, docker_engine: DockerEngine, tmp_path: Path
) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(FOREIGN)
    docker_engine.docker("build", "--tag", "others/env:1", "-", stdin=dockerfile)
    environment = launched(docker_machine, "docker://others/env:1")
    assert environment["state"] == "READY"
    docker_machine.ok("down", "env")
    refused = docker_machine.run("launch", "docker://others/env:1", "--max", "2", timeout=200)
    assert refused.code != 0
    assert "does not say how many sessions it has" in refused.err
    assert containers(docker_engine) == []


def test_what_is_restarted_runs_the_image_of_its_launch_whatever_its_name_stands_for_now(
    docker_machine: Machine, docker_engine: DockerEngine, tmp_path: Path
) -> None:
    def build(version: str) -> None:
        text = FOREIGN.replace('"healthy"', f'"healthy", "version": "{version}"')
        (tmp_path / "Dockerfile").write_text(text)
        docker_engine.docker("build", "--tag", "moved:latest", str(tmp_path))

    def is_ready_again() -> bool:
        [replica] = docker_machine.environment("moved")["replicas"]
        return bool(replica["restarts"] == 1 and replica["state"] == "READY")

    build("1")
    address = launched(docker_machine, "docker://moved:latest")["address"]
    build("2")
    docker_engine.docker("kill", *docker_engine.docker("ps", "--quiet").split())
    eventually(is_ready_again, within=60)
    with urlopen(f"{address}/health") as response:
        assert json.load(response)["version"] == "1"
    docker_machine.ok("down", "moved")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["docker://openenvd-none:1"], "docker load"),
        (
            ["echo", "--provider", "docker", "--engine-option", "shmsize=1g"],
            "did you mean shm-size?",
        ),
        (["echo", "--sandbox"], "for engines alone"),
        (["docker://Not An Image"], "cannot be the name of an image"),
    ],
)
def test_what_cannot_be_launched_is_said_with_what_mends_it(
    docker_machine: Machine, words: list[str], said: str
) -> None:
    answer = docker_machine.run("launch", *words, timeout=200)
    assert answer.code in (1, 2), answer.text
    assert said in answer.err


def test_without_a_running_engine_the_message_says_how_to_start_it(machine: Machine) -> None:
    machine.environ["DOCKER_HOST"] = f"unix://{machine.home}/nowhere.sock"
    answer = machine.run("launch", "echo", "--provider", "docker")
    assert answer.code == 1, answer.text
    assert "sudo systemctl start docker" in answer.err


def test_two_engines_of_one_home_keep_their_replicas_whatever_variables_come_later(
    docker_machine: Machine, docker_engine: DockerEngine
) -> None:
    machine = docker_machine
    with smoke_cache() as cache:
        base_image(cache)
    with running_engine(cache) as second:
        here = launched(machine, "echo", "--provider", "docker")
        machine.ok("stop")
        machine.environ["DOCKER_HOST"] = second.host
        there = launched(machine, "echo", "--name", "there", "--provider", "docker")
        for environment in (here, there):
            say_hello(environment["address"])
        assert machine.environment("echo")["state"] == "READY"
        kill_agents(machine)
        machine.environ["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
        machine.ok("stop")
        machine.ok("up")
        eventually(lambda: machine.environment("echo")["state"] == "READY")
        eventually(lambda: machine.environment("there")["state"] == "READY")
        machine.ok("down", "--all")
        assert containers(docker_engine) == containers(second) == []


def test_an_agent_that_is_killed_all_the_time_loses_and_doubles_nothing(
    docker_machine: Machine, docker_engine: DockerEngine, tmp_path: Path
) -> None:
    machine = docker_machine
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(COUNTING)
    docker_engine.docker("build", "--tag", "counting:1", "-", stdin=dockerfile)
    launched(machine, "docker://counting:1", "--name", "steady")
    [steady] = containers(docker_engine)
    follower = machine.start("logs", "--follow", "steady")
    chance = random.Random(14)

    def kill() -> None:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.2, 2.0))
            kill_agents(machine)

    killer = threading.Thread(target=kill)
    killer.start()
    while killer.is_alive():
        launched(machine, "docker://counting:1", "--name", "brief")
        assert len(containers(docker_engine)) == 2
        machine.ok("down", "brief")
        assert containers(docker_engine) == [steady]
    assert machine.environment("steady")["replicas"][0]["restarts"] == 0
    machine.ok("down", "steady")
    assert containers(docker_engine) == []
    follower.send_signal(signal.SIGINT)
    printed, _ = follower.communicate(timeout=30)
    lines = [int(line) for line in printed.split("\n") if line.isdigit()]
    assert lines == list(range(len(lines)))
    assert len(lines) > KILLS


def kill_agents(machine: Machine) -> None:
    for process in psutil.process_iter(["cmdline", "environ"]):
        is_agent = "openenvd: agent" in " ".join(process.info["cmdline"] or ())
        home = (process.info["environ"] or {}).get("OPENENV_HOME")
        if is_agent and home == str(machine.home):
            process.kill()


@pytest.mark.parametrize("page", pages_that_need("docker"), ids=name_of)
def test_the_blocks_of_a_page_that_need_docker_run(docker_machine: Machine, page: Path) -> None:
    run_blocks(docker_machine, page, "docker")
