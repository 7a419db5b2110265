# SPDX-License-Identifier: Apache-2.0
"""What `engines/swarm/engine.py` says of services, held against a real swarm of one node."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from openenvd.environments.engines.base import EngineRefused, Instance, InstanceState, ReplicaPlan
from openenvd.environments.engines.docker.engine import DockerEngine
from openenvd.environments.engines.swarm.engine import SwarmEngine
from openenvd.schema.errors import NotAnswering
from openenvd.schema.protocol import HOST_OPTIONS_VARIABLE

from ..conftest import eventually
from .docker_engine import DockerEngine as RealEngine
from .test_docker_engine import plan_of

SERVICES = 12  # at once: Swarm makes the tasks of some a moment after their services


@pytest.fixture
def engine(swarm_engine: RealEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwarmEngine]:
    monkeypatch.setenv("DOCKER_HOST", swarm_engine.host)
    made = SwarmEngine()
    yield made
    for instance in made.list():
        made.remove(instance)
    made._api.close()


def reached(engine: SwarmEngine, plan: ReplicaPlan, state: InstanceState) -> Instance:
    """The instance, once it is in a state."""

    def is_there() -> bool:
        found = engine.find(plan)
        return found is not None and found.state is state

    eventually(is_there)
    found = engine.find(plan)
    assert found is not None
    return found


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


@pytest.mark.parametrize(
    ("options", "said"),
    [({"shm-size": "1g"}, "cannot have Docker's ShmSize"), ({"nonsense": "1"}, "no option")],
)
def test_an_option_that_services_do_not_have_is_refused(
    engine: SwarmEngine, options: dict[str, str], said: str
) -> None:
    with pytest.raises(EngineRefused, match=said):
        engine.start(plan_of(options=options))


def test_a_server_elsewhere_that_does_not_answer_is_no_word_of_dockers(
    engine: SwarmEngine,
) -> None:
    """As one on another node is drained, of which there is none here."""
    options = json.dumps({"drain_secret": "a-secret-of-letters"})
    service = started(engine, plan_of(env={HOST_OPTIONS_VARIABLE: options}))

    def drain(port: int) -> None:
        engine._ask_to_drain(dataclasses.replace(service, address=f"http://127.0.0.1:{port}"))

    with answering(503) as port, pytest.raises(NotAnswering, match="503"):
        drain(port)
    with answering(403) as port, pytest.raises(EngineRefused, match="403"):
        drain(port)
    with pytest.raises(NotAnswering, match="nothing answers at"):
        drain(port)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers everything with a status; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(status)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_service_is_named_whatever_its_replica_is(engine: SwarmEngine) -> None:
    plan = plan_of()
    labels = dataclasses.replace(plan.labels, replica=f"my.{'long' * 15}-0-15893c0ab45f1a2e")
    plan = dataclasses.replace(plan, labels=labels)
    assert started(engine, plan).labels.replica == labels.replica


def test_on_a_network_whose_ports_are_exposed_a_token_is_asked_for(
    engine: SwarmEngine, swarm_engine: RealEngine
) -> None:
    swarm_engine.docker("network", "create", "--driver", "overlay", "--attachable", "wide")
    try:
        with pytest.raises(EngineRefused, match="all addresses"):
            engine.start(plan_of(options={"network": "wide"}))
        with pytest.raises(EngineRefused, match="network none-such not found"):
            engine.start(plan_of(options={"network": "none-such"}))
    finally:
        swarm_engine.docker("network", "rm", "wide")


def test_a_look_is_three_questions_however_many_services_there_are(
    engine: SwarmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [plan_of() for _ in range(3)]
    for plan in plans:
        started(engine, plan)
    asked: list[str] = []
    monkeypatch.setattr(engine._api, "get", counting(engine._api.get, asked))
    assert {each.state for each in engine.list()} == {InstanceState.RUNNING}
    assert len(asked) == 3


def counting(get: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    """The same, which writes down what is asked for."""

    def counted(url: str, **options: Any) -> Any:
        asked.append(url)
        return get(url, **options)

    return counted


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
    assert found.works
    assert not any("all addresses" in note for note in found.notes)
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    alone = SwarmEngine().check()
    assert alone.problem == "this machine is in no swarm"
    assert str(alone.remedy).startswith("docker swarm init")
    assert DockerEngine().check().works


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
