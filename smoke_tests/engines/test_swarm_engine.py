# SPDX-License-Identifier: Apache-2.0
"""What `engines/swarm/engine.py` reports of services in a real swarm of one node."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from openenvd.environments.engines.base import EngineRefused, Instance, InstanceState, ReplicaPlan
from openenvd.environments.engines.docker.engine import DockerEngine
from openenvd.environments.engines.swarm.engine import SwarmEngine

from ..conftest import eventually
from .docker_engine import DockerEngine as RealEngine
from .test_docker_engine import plan_of, reached

SERVICES = 12  # at once: Swarm makes the tasks of some a moment after their services


@pytest.fixture
def engine(swarm_engine: RealEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwarmEngine]:
    monkeypatch.setenv("DOCKER_HOST", swarm_engine.host)
    made = SwarmEngine()
    yield made
    for instance in made.list():
        made.remove(instance)
    made._api.close()


def started(engine: SwarmEngine, plan: ReplicaPlan) -> Instance:
    engine.start(plan)
    return reached(engine, plan, InstanceState.RUNNING)


def test_a_server_that_is_not_ours_is_not_drained(engine: SwarmEngine) -> None:
    assert not started(engine, plan_of()).drains


def test_a_service_that_finds_no_place_says_why_and_can_be_removed(engine: SwarmEngine) -> None:
    plan = plan_of(options={"constraint": "node.labels.none==such"})
    engine.start(plan)
    eventually(lambda: "no suitable node" in str(waiting(engine, plan)))
    instance = reached(engine, plan, InstanceState.STARTING)
    engine.stop(instance, 1.0)
    engine.remove(instance)
    assert engine.find(plan) is None


def waiting(engine: SwarmEngine, plan: ReplicaPlan) -> str | None:
    found = engine.find(plan)
    return None if found is None else found.waiting


def test_on_a_network_whose_ports_are_exposed_a_token_is_asked_for(
    engine: SwarmEngine, swarm_engine: RealEngine
) -> None:
    swarm_engine.docker("network", "create", "--driver", "overlay", "--attachable", "wide")
    try:
        with pytest.raises(EngineRefused, match="addresses, and its server"):
            engine.start(plan_of(options={"network": "wide"}))
        with pytest.raises(EngineRefused, match="network none-such not found"):
            engine.start(plan_of(options={"network": "none-such"}))
    finally:
        swarm_engine.docker("network", "rm", "wide")


def test_a_port_that_another_task_has_waits(engine: SwarmEngine) -> None:
    first = plan_of()
    started(engine, first)
    second = plan_of(port=first.port)
    engine.start(second)
    eventually(lambda: "host-mode port" in str(waiting(engine, second)))


def test_what_is_missing_is_told_by_the_check(
    engine: SwarmEngine, docker_engine: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine.check()
    assert found.problem is None
    assert not any("addresses" in note for note in found.notes)
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    alone = SwarmEngine().check()
    assert alone.problem == "this machine is in no swarm"
    assert str(alone.remedy).startswith("docker swarm init")
    assert DockerEngine().check().problem is None


def test_the_log_of_each_service_is_whole_though_it_is_asked_for_before_there_is_a_task(
    engine: SwarmEngine,
) -> None:
    def output(_: int) -> list[bytes]:
        plan = plan_of("print('first')\nprint('last')")
        engine.start(plan)
        instance = reached(engine, plan, InstanceState.EXITED)
        return [chunk.data for chunk in engine.logs(instance, None)]

    with ThreadPoolExecutor(SERVICES) as threads:
        assert list(threads.map(output, range(SERVICES))) == [[b"first\n", b"last\n"]] * SERVICES


def test_the_log_of_a_service_that_is_removed_ends(engine: SwarmEngine) -> None:
    instance = engine.start(plan_of("print('first')"))
    engine.remove(instance)
    assert [chunk.data for chunk in engine.logs(instance, None)] in ([], [b"first\n"])
