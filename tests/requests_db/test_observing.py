# SPDX-License-Identifier: Apache-2.0
"""Environments and replicas as the reconciler writes them."""

from dataclasses import replace
from typing import Any

import pytest

from openenvd.requests_db.records import Environment, Replica, RequestError
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import observing
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState

from .conftest import EVERY_ENVIRONMENT, Api

E = EnvironmentState
ERROR = RequestError(ErrorKind.WORKER_LOST, "it is gone", "launch it again")
REPLICA = Replica("trial-0-7f3a", "trial", 0, "local", ReplicaState.STARTING, "/run/x", 1.5)
ADDRESS = "http://127.0.0.1:21000"


@pytest.fixture
async def trial(api: Api) -> Environment:
    await api.launch()
    return await api.environment()


async def test_a_change_of_state_is_written_with_its_event(api: Api, trial: Environment) -> None:
    event = await api.goes(E.READY, address=ADDRESS)
    assert event is not None
    assert (event.kind, event.environment, event.at) == ("environment.state", "trial", 200.5)
    assert event.data == {"state": "READY", "address": ADDRESS}
    ready = replace(trial, state=E.READY, address=ADDRESS, updated_at=200.5)
    assert await api.environment() == ready
    assert await api.goes(E.READY, name="nobody") is None
    assert await api.read(queries.environment("nobody")) is None


@pytest.mark.usefixtures("trial")
async def test_an_error_stays_while_the_environment_is_failed_and_no_longer(api: Api) -> None:
    await api.goes(E.DEGRADED, error=ERROR)
    await api.goes(E.READY)
    assert (await api.environment()).error is None
    await api.goes(E.FAILED)
    event = await api.goes(E.FAILED, error=ERROR)
    assert event is not None
    assert event.data["error"] == "it is gone"
    assert await api.goes(E.FAILED) is None
    assert (await api.environment()).error == ERROR


@pytest.mark.usefixtures("trial")
async def test_failed_environments_have_no_name_and_stopped_ones_are_listed_on_request(
    api: Api,
) -> None:
    async def lists() -> list[list[str]]:
        found = [await api.read(each) for each in (queries.NOT_STOPPED, EVERY_ENVIRONMENT)]
        return [await api.read(queries.NAMES), *([e.name for e in each] for each in found)]

    assert await lists() == [["trial"], ["trial"], ["trial"]]
    await api.goes(E.FAILED)
    assert await lists() == [[], ["trial"], ["trial"]]
    await api.goes(E.STOPPED)
    assert await lists() == [[], [], ["trial"]]


async def test_each_change_of_a_replica_writes_one_event(api: Api) -> None:
    assert await api.put(REPLICA) is not None
    assert await api.put(REPLICA) is None
    changes: dict[str, Any] = {"state": ReplicaState.BACKING_OFF, "restarts": 1, "pid": 7}
    died = replace(REPLICA, **changes, exit={"kind": "exited"})
    event = await api.put(died)
    assert event is not None
    assert (event.kind, event.environment) == ("replica.state", "trial")
    known = {"id": REPLICA.id, "ordinal": 0, "exit": {"kind": "exited"}}
    assert event.data == changes | known
    assert await api.read(queries.replicas("trial")) == [died]


async def test_replicas_are_listed_by_environment_and_ordinal(api: Api) -> None:
    async def listed() -> list[str]:
        found = await api.read(queries.REPLICAS_OF_EACH)
        return [replica.id for own in found.values() for replica in own]

    for name, ordinal in (("b", 0), ("a", 1), ("a", 0)):
        own: dict[str, Any] = {"id": f"{name}-{ordinal}", "environment": name, "ordinal": ordinal}
        await api.put(replace(REPLICA, **own))
    assert await listed() == ["a-0", "a-1", "b-0"]
    assert [replica.id for replica in await api.read(queries.replicas("a"))] == ["a-0", "a-1"]
    await api.write(observing.delete_replicas, "a")
    assert await listed() == ["b-0"]


@pytest.mark.usefixtures("trial")
async def test_replicas_are_forgotten_with_a_new_launch_and_when_drained(api: Api) -> None:
    await api.put(REPLICA)
    await api.goes(E.FAILED)
    await api.launch()
    assert await api.read(queries.replicas("trial")) == []
    for state in (ReplicaState.READY, ReplicaState.DRAINING):
        await api.put(replace(REPLICA, state=state))
    assert [r.state for r in await api.read(queries.replicas("trial"))] == ["DRAINING"]
    event = await api.put(replace(REPLICA, state=ReplicaState.STOPPED))
    assert event is not None
    assert event.data["state"] == "STOPPED"
    assert await api.read(queries.replicas("trial")) == []
