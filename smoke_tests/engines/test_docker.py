# SPDX-License-Identifier: Apache-2.0
"""Environments whose replicas are containers: the real command, daemon, agent and dockerd."""

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from ..conftest import Machine, eventually
from ..pages import name_of, pages_that_need, run_blocks
from .docker_engine import DockerEngine

FOREIGN = """
FROM python:3.11-slim
RUN mkdir -p /srv && echo '{"status": "healthy"}' > /srv/health
WORKDIR /srv
CMD python3 -u -m http.server 8000
"""


def launched(machine: Machine, *words: str, cwd: Path | None = None) -> dict[str, Any]:
    answer = machine.ok("launch", *words, "--json", timeout=300, cwd=cwd).json
    environment: dict[str, Any] = answer["environment"]
    return environment


def containers(engine: DockerEngine) -> list[str]:
    return engine.docker("ps", "--all", "--quiet", "--filter", "label=openenvd.home").split()


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
    assert "does not report how many sessions it has" in refused.err
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


def test_an_image_that_is_nowhere_is_named_with_what_brings_it(docker_machine: Machine) -> None:
    answer = docker_machine.run("launch", "docker://openenvd-none:1", timeout=200)
    assert answer.code == 1, answer.text
    assert "docker load" in answer.err


@pytest.mark.parametrize("page", pages_that_need("docker"), ids=name_of)
def test_the_blocks_of_a_page_that_need_docker_run(docker_machine: Machine, page: Path) -> None:
    run_blocks(docker_machine, page, "docker")
