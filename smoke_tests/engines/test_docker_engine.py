# SPDX-License-Identifier: Apache-2.0
"""What `environments/engines/docker/engine.py` reports of containers of a real dockerd."""

import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines.base import (
    Engine,
    EngineGone,
    EngineRefused,
    Instance,
    InstanceState,
    Labels,
    ReplicaPlan,
)
from openenvd.environments.engines.docker.engine import DockerEngine
from openenvd.schema.spec import DEFAULT_BASE

from ..conftest import eventually, free_port
from . import docker_engine as engines

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def engine(
    docker_engine: engines.DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DockerEngine]:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    made = DockerEngine()
    yield made
    for instance in made.list():
        made.remove(instance)
    made._api.close()


def plan_of(program: str = SLEEP, **more: Any) -> ReplicaPlan:
    labels = Labels("home", "sample", f"sample-0-{uuid.uuid4().hex[:12]}", "request")
    command = ("python3", "-uc", program)
    plan = ReplicaPlan(
        labels=labels, image=DEFAULT_BASE, command=command, host="127.0.0.1", port=free_port()
    )
    return dataclasses.replace(plan, **more)


def reached(engine: Engine, plan: ReplicaPlan, state: InstanceState) -> Instance:
    """Wait for an instance to be in a state."""
    eventually(lambda: state_of(engine, plan) is state, within=60)
    found = engine.find(plan)
    assert found is not None
    return found


def state_of(engine: Engine, plan: ReplicaPlan) -> InstanceState | None:
    found = engine.find(plan)
    return None if found is None else found.state


def refused(engine: DockerEngine, plan: ReplicaPlan) -> EngineRefused:
    with pytest.raises(EngineRefused) as found:
        engine.start(plan)
    assert state_of(engine, plan) is None, "something is left of it"
    return found.value


def test_a_program_that_is_not_in_the_image_is_refused(engine: DockerEngine) -> None:
    # Docker's init starts any command; for a missing one it exits with a shell's code.
    plan = plan_of(command=("/no/such/program",))
    engine.start(plan)
    facts = reached(engine, plan, InstanceState.EXITED).exit
    assert facts is not None
    assert facts.exit_code == 127
    error = refused(engine, plan_of(command=("/no/such",), options={"init": "false"}))
    assert "no such file" in error.message


def test_a_token_that_the_server_would_not_ask_for_is_refused(engine: DockerEngine) -> None:
    env = {"OPENENVD_HOST_OPTIONS": '{"token": "a-secret-of-some-length"}'}
    assert "would not ask for the token" in refused(engine, plan_of(env=env)).message


def test_the_one_port_that_a_foreign_image_exposes_is_published(
    engine: DockerEngine, docker_engine: engines.DockerEngine, tmp_path: Path
) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"FROM {DEFAULT_BASE}\nEXPOSE 7860\n")
    docker_engine.docker("build", "--tag", "foreign:1", "-", stdin=dockerfile)
    plan = plan_of(image="foreign:1")
    instance = engine.start(plan)
    published = docker_engine.docker("port", instance.id)
    assert published == f"7860/tcp -> 127.0.0.1:{plan.port}"


# docker-py leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
def test_what_is_missing_is_told_by_the_check(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine.check()
    assert found.problem is None
    assert found.version
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(EngineGone) as gone:
        DockerEngine().check()
    what = "Docker is not running: nothing answers at unix:///nowhere/docker.sock"
    assert gone.value.message == what
    assert "systemctl start docker" in str(gone.value.hint)
