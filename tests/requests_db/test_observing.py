# SPDX-License-Identifier: Apache-2.0
"""Environments and replicas as the reconciler writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.records import (
    Environment,
    NewRequest,
    Replica,
    RequestError,
)
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import observing, submitting
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState, Schedule

MakeEnvironment = Callable[..., Environment]

ERROR = RequestError(ErrorKind.WORKER_LOST, "it is gone", "launch it again")
REPLICA = Replica("trial-0-7f3a", "trial", 0, "local", ReplicaState.STARTING, "/run/x", 1.5)


@pytest.fixture
async def trial(store: AsyncStore, make_environment: MakeEnvironment) -> Environment:
    """An environment whose launch is pending."""
    launch = NewRequest("launch", Schedule.LONG, {}, environment="trial")
    result = await store.write(
        submitting.submit, launch, environment=make_environment("trial"), now=100.5
    )
    assert isinstance(result, Submitted)
    found = await store.read(queries.environment("trial"))
    assert found is not None
    return found


async def test_a_change_of_state_is_written_with_its_event(
    store: AsyncStore, trial: Environment
) -> None:
    event = await store.write(
        observing.set_environment_state,
        "trial",
        EnvironmentState.READY,
        address="http://127.0.0.1:21000",
        now=200.5,
    )
    assert event is not None
    assert (event.kind, event.environment, event.at) == ("environment.state", "trial", 200.5)
    assert event.data == {"state": "READY", "address": "http://127.0.0.1:21000"}
    assert await store.read(queries.environment("trial")) == replace(
        trial,
        state=EnvironmentState.READY,
        address="http://127.0.0.1:21000",
        updated_at=200.5,
    )


async def test_an_unknown_environment_has_no_state_to_change(store: AsyncStore) -> None:
    assert (
        await store.write(
            observing.set_environment_state, "nobody", EnvironmentState.READY, now=1.5
        )
        is None
    )
    assert await store.read(queries.environment("nobody")) is None


@pytest.mark.usefixtures("trial")
async def test_an_error_stays_while_the_environment_is_failed(store: AsyncStore) -> None:
    await store.write(observing.set_environment_state, "trial", EnvironmentState.FAILED, now=200.5)
    event = await store.write(
        observing.set_environment_state, "trial", EnvironmentState.FAILED, error=ERROR, now=201.5
    )
    assert event is not None
    assert event.data["error"] == "it is gone"
    assert (
        await store.write(
            observing.set_environment_state, "trial", EnvironmentState.FAILED, now=202.5
        )
        is None
    )
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert environment.error == ERROR


@pytest.mark.usefixtures("trial")
async def test_another_state_clears_the_error(store: AsyncStore) -> None:
    await store.write(
        observing.set_environment_state, "trial", EnvironmentState.DEGRADED, error=ERROR, now=200.5
    )
    await store.write(observing.set_environment_state, "trial", EnvironmentState.READY, now=201.5)
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert environment.error is None


@pytest.mark.usefixtures("trial")
async def test_stopped_environments_are_listed_only_on_request(store: AsyncStore) -> None:
    assert [e.name for e in await store.read(queries.environments())] == ["trial"]
    await store.write(observing.set_environment_state, "trial", EnvironmentState.STOPPED, now=200.5)
    assert await store.read(queries.environments()) == []
    assert [e.name for e in await store.read(queries.environments(include_stopped=True))] == [
        "trial"
    ]


@pytest.mark.usefixtures("trial")
async def test_names_lists_environments_that_are_neither_failed_nor_stopped(
    store: AsyncStore,
) -> None:
    assert await store.read(queries.NAMES) == ["trial"]
    await store.write(observing.set_environment_state, "trial", EnvironmentState.FAILED, now=200.5)
    assert await store.read(queries.NAMES) == []
    await store.write(observing.set_environment_state, "trial", EnvironmentState.STOPPED, now=201.5)
    assert await store.read(queries.NAMES) == []


async def test_each_change_of_a_replica_writes_one_event(store: AsyncStore) -> None:
    assert await store.write(observing.upsert_replica, REPLICA, now=2.5) is not None
    assert await store.write(observing.upsert_replica, REPLICA, now=3.5) is None
    died = replace(
        REPLICA, state=ReplicaState.BACKING_OFF, restarts=1, pid=7, exit={"kind": "exited"}
    )
    event = await store.write(observing.upsert_replica, died, now=4.5)
    assert event is not None
    assert (event.kind, event.environment) == ("replica.state", "trial")
    assert event.data == {
        "id": REPLICA.id,
        "ordinal": 0,
        "state": "BACKING_OFF",
        "pid": 7,
        "restarts": 1,
        "exit": {"kind": "exited"},
    }
    assert await store.read(queries.replicas("trial")) == [died]


async def test_replicas_are_listed_by_environment_and_ordinal(store: AsyncStore) -> None:
    for name, ordinal in (("b", 0), ("a", 1), ("a", 0)):
        other = replace(REPLICA, id=f"{name}-{ordinal}", environment=name, ordinal=ordinal)
        await store.write(observing.upsert_replica, other, now=2.5)
    assert [replica.id for replica in await store.read(queries.replicas())] == ["a-0", "a-1", "b-0"]
    assert [replica.id for replica in await store.read(queries.replicas("a"))] == ["a-0", "a-1"]
    await store.write(observing.delete_replicas, "a")
    assert [replica.id for replica in await store.read(queries.replicas())] == ["b-0"]


@pytest.mark.usefixtures("trial")
async def test_a_new_launch_under_an_old_name_starts_without_its_replicas(
    store: AsyncStore, make_environment: MakeEnvironment
) -> None:
    await store.write(observing.upsert_replica, REPLICA, now=2.5)
    await store.write(observing.set_environment_state, "trial", EnvironmentState.FAILED, now=200.5)
    launch = NewRequest("launch", Schedule.LONG, {}, environment="trial")
    await store.write(submitting.submit, launch, environment=make_environment("trial"), now=300.5)
    assert await store.read(queries.replicas("trial")) == []


async def test_a_replica_that_was_drained_is_forgotten_when_it_has_stopped(
    store: AsyncStore, trial: Environment
) -> None:
    for state in (ReplicaState.READY, ReplicaState.DRAINING):
        await store.write(observing.upsert_replica, replace(REPLICA, state=state), now=1.0)
    assert [r.state for r in await store.read(queries.replicas("trial"))] == ["DRAINING"]
    stopped = replace(REPLICA, state=ReplicaState.STOPPED)
    event = await store.write(observing.upsert_replica, stopped, now=2.0)
    assert event is not None
    assert event.data["state"] == "STOPPED"
    assert await store.read(queries.replicas("trial")) == []
