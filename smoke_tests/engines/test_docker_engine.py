# SPDX-License-Identifier: Apache-2.0
"""What `environments/engines/docker/engine.py` says of containers, held against a real dockerd."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines.base import (
    EngineGone,
    EngineRefused,
    Instance,
    InstanceState,
    Labels,
    ReplicaPlan,
)
from openenvd.environments.engines.docker.engine import DockerEngine
from openenvd.schema.spec import DEFAULT_BASE
from openenvd.system.text.units import MB

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


def ended(engine: DockerEngine, plan: ReplicaPlan) -> Instance:
    """The instance, once it has exited by itself."""
    engine.start(plan)
    eventually(lambda: state_of(engine, plan) is InstanceState.EXITED)
    found = engine.find(plan)
    assert found is not None
    return found


def state_of(engine: DockerEngine, plan: ReplicaPlan) -> InstanceState | None:
    found = engine.find(plan)
    return None if found is None else found.state


def test_a_container_that_an_agent_left_created_is_started(
    engine: DockerEngine, docker_engine: engines.DockerEngine
) -> None:
    plan = plan_of()
    started = engine.start(plan)
    engine.remove(started)
    labels = [word for k, v in plan.labels.to_labels().items() for word in ("--label", f"{k}={v}")]
    docker_engine.docker("create", "--name", plan.name, *labels, plan.image, *plan.command)
    assert state_of(engine, plan) is InstanceState.STARTING
    assert engine.start(plan).state is InstanceState.RUNNING


def test_logs_begin_where_a_cursor_says_and_end_with_the_container(engine: DockerEngine) -> None:
    program = "import sys\nfor n in range(500): print(n, file=(sys.stdout, sys.stderr)[n % 2])"
    instance = ended(engine, plan_of(program))
    chunks = list(engine.logs(instance, None))
    # The two streams reach the engine by two pipes: each keeps its order.
    assert sorted(int(chunk.data) for chunk in chunks) == list(range(500))
    for place in (0, 250, 499):
        rest = list(engine.logs(instance, chunks[place].cursor))
        assert [chunk.data for chunk in rest] == [chunk.data for chunk in chunks[place + 1 :]]


def test_a_long_line_is_resumed_within(engine: DockerEngine) -> None:
    instance = ended(engine, plan_of("print('x' * 100_000)"))
    chunks = list(engine.logs(instance, None))
    assert b"".join(chunk.data for chunk in chunks).replace(b"\n", b"") == b"x" * 100_000
    assert len(chunks) > 2
    rest = list(engine.logs(instance, chunks[1].cursor))
    assert [chunk.data for chunk in rest] == [chunk.data for chunk in chunks[2:]]


def test_changes_are_told(engine: DockerEngine) -> None:
    seen = threading.Semaphore(0)

    def watch() -> None:
        with contextlib.suppress(EngineGone):  # at the end of its engine
            for _ in engine.changes():
                seen.release()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert seen.acquire(timeout=10)  # it listens
    instance = engine.start(plan_of())
    assert seen.acquire(timeout=10)
    engine.remove(instance)
    assert seen.acquire(timeout=10)


def refused(engine: DockerEngine, plan: ReplicaPlan) -> EngineRefused:
    with pytest.raises(EngineRefused) as found:
        engine.start(plan)
    assert state_of(engine, plan) is None, "something is left of it"
    return found.value


def test_a_program_that_is_not_in_the_image_is_refused(engine: DockerEngine) -> None:
    # Docker's init starts whatever it is told; it is what ends, with the code of a shell.
    facts = ended(engine, plan_of(command=("/no/such/program",))).exit
    assert facts is not None
    assert facts.exit_code == 127
    error = refused(engine, plan_of(command=("/no/such",), options={"init": "false"}))
    assert "no such file" in error.message


def test_a_token_that_the_server_would_not_ask_for_is_refused(engine: DockerEngine) -> None:
    env = {"OPENENVD_HOST_OPTIONS": '{"token": "a-secret-of-some-length"}'}
    assert "would not ask for the token" in refused(engine, plan_of(env=env)).message


@pytest.mark.parametrize(
    ("more", "program", "said"),
    [
        ({"options": {"user": "1000"}}, "import os; print(os.getuid())", "1000"),
        (
            {"options": {"shm-size": "8m"}},
            "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)",
            str(8 * MB),
        ),
    ],
)
def test_an_option_holds_inside(
    engine: DockerEngine, more: dict[str, Any], program: str, said: str
) -> None:
    instance = ended(engine, plan_of(program, **more))
    output = b"".join(chunk.data for chunk in engine.logs(instance, None)).decode()
    assert said in output


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


# docker-py leaves the socket of a connection that was refused to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
def test_what_is_missing_is_told_by_the_check(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine.check()
    assert found.works
    assert found.version
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(EngineGone) as gone:
        DockerEngine().check()
    what = "Docker is not running: nothing answers at unix:///nowhere/docker.sock"
    assert gone.value.message == what
    assert "systemctl start docker" in str(gone.value.hint)


# docker-py leaves the socket of a connection that was refused to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
def test_a_killed_dockerd_is_gone_and_its_containers_run_on(
    engine: DockerEngine, docker_engine: engines.DockerEngine
) -> None:
    each = "import time\nfor n in range(10**6):\n    print(n)\n    time.sleep(0.05)"
    plan = plan_of(each)
    instance = engine.start(plan)
    read: list[int] = []
    cursor: list[str | None] = [None]

    def follow(until: Callable[[], bool]) -> None:
        for chunk in engine.logs(instance, cursor[0]):
            read.append(int(chunk.data))
            cursor[0] = chunk.cursor
            if until():
                return

    follow(lambda: len(read) > 10)
    docker_engine.kill()
    with pytest.raises(EngineGone):
        engine.find(plan)
    docker_engine.start()
    again = engine.find(plan)
    assert again is not None
    assert (again.id, again.state, again.pid) == (instance.id, instance.state, instance.pid)
    last = read[-1]
    follow(lambda: read[-1] > last + 20)
    assert read == list(range(len(read)))
