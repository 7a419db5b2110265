# SPDX-License-Identifier: Apache-2.0
"""What is collected, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import (
    Environment,
    MemoryEstimate,
    NewRequest,
    Outcome,
    Replica,
    Request,
)
from openenvd.requests_db.results import Duplicate, Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, observing, retention, submitting
from openenvd.schema.states import EnvironmentState, ReplicaState, RequestState, Schedule

from .conftest import CREATED_AT, ENDED_AT

Make = Callable[..., Request]

KEEP_ALL = 10**6
DAY = 86_400.0


def old_event(dispatch: WriteConnection) -> int:
    """All that has happened by now is old, after one day that a daemon has run."""
    dispatch.write(retention.note_time, 0.0, DAY)
    return dispatch.write(retention.note_time, DAY, DAY)


@pytest.fixture(params=[0.0, -DAY, DAY], ids=["steady", "a day back", "a day ahead"])
def later(request: pytest.FixtureRequest) -> float:
    """By how much the wall clock has stepped between what is old and what is not."""
    step: float = request.param
    return ENDED_AT + step


def test_old_requests_are_collected_by_age(
    make_request: Make, dispatch: WriteConnection, later: float
) -> None:
    old = make_request(RequestState.FAILED)
    bound = old_event(dispatch)
    make_request(RequestState.FAILED, ended_at=later)
    assert retention.collect(dispatch, bound, KEEP_ALL) == [old.id]
    assert retention.collect(dispatch, bound, KEEP_ALL) == []


def test_age_is_the_time_that_daemons_have_run(
    make_request: Make, dispatch: WriteConnection, path: Path
) -> None:
    make_request(RequestState.FAILED)
    last = dispatch.write(retention.note_time, 0.0, 0.0)
    assert [dispatch.write(retention.note_time, DAY / 4, DAY) for _ in range(3)] == [0, 0, 0]
    dispatch.close()
    again = WriteConnection(path)  # the next daemon goes on, whenever that is
    assert again.write(retention.note_time, DAY / 4, DAY) == last
    again.close()


def test_few_marks_are_kept(dispatch: WriteConnection, writer: WriteConnection) -> None:
    for _ in range(500):
        dispatch.write(retention.note_time, DAY / 100, DAY)
    with writer.transaction() as connection:
        count = connection.exec_driver_sql("SELECT count(*) FROM marks").scalar()
    assert count is not None
    assert count < 110


def test_the_newest_requests_are_kept_by_number(
    make_request: Make, dispatch: WriteConnection
) -> None:
    ids = [make_request(RequestState.SUCCEEDED).id for _ in range(5)]
    assert retention.collect(dispatch, 0, 2) == ids[:3]


async def test_a_key_is_kept_as_long_as_its_request(
    make_request: Make, dispatch: WriteConnection, store: AsyncStore
) -> None:
    first = make_request(RequestState.SUCCEEDED, idempotency_key="once")
    same = NewRequest(first.operation, first.schedule, first.payload, idempotency_key="once")
    found = await store.write(submitting.submit, same, now=ENDED_AT)
    assert isinstance(found, Duplicate)
    retention.collect(dispatch, 0, 0)
    assert isinstance(await store.write(submitting.submit, same, now=ENDED_AT), Submitted)


def test_unfinished_requests_always_stay(make_request: Make, dispatch: WriteConnection) -> None:
    make_request(RequestState.RUNNING)
    make_request(RequestState.PENDING)
    assert retention.collect(dispatch, old_event(dispatch), 0) == []


async def test_events_of_collected_requests_are_removed_and_their_numbers_not_reused(
    make_request: Make, dispatch: WriteConnection, store: AsyncStore
) -> None:
    request = make_request(RequestState.SUCCEEDED)
    last = await store.read(queries.LAST_SEQ)
    retention.collect(dispatch, old_event(dispatch), KEEP_ALL)
    assert await store.read(queries.get(request.id)) == ()
    assert await store.read(queries.events_after(0)) == []
    newer = make_request()
    assert await store.read(queries.LAST_SEQ) == last + 1
    assert newer.seq == request.seq + 1


async def test_the_launch_of_a_live_environment_stays(
    dispatch: WriteConnection, store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    launch = NewRequest("launch", Schedule.LONG, {}, environment="trial")
    result = await store.write(
        submitting.submit, launch, environment=make_environment("trial"), now=CREATED_AT
    )
    assert isinstance(result, Submitted)
    dispatch.write(dispatching.claim, Schedule.LONG, 1, CREATED_AT)
    dispatch.write(
        dispatching.record, outcomes=[Outcome(result.request.id, RequestState.SUCCEEDED, ENDED_AT)]
    )
    assert retention.collect(dispatch, old_event(dispatch), 0) == []
    stopped = EnvironmentState.STOPPED
    await store.write(observing.set_environment_state, "trial", stopped, now=ENDED_AT)
    assert retention.collect(dispatch, old_event(dispatch), 0) == [result.request.id]


async def test_environments_that_ended_long_ago_are_collected_with_their_replicas(
    dispatch: WriteConnection,
    store: AsyncStore,
    make_environment: Callable[..., Environment],
    later: float,
) -> None:
    launches = {}
    for name in ("old", "new", "live"):
        launch = NewRequest("launch", Schedule.LONG, {}, environment=name)
        submitted = await store.write(
            submitting.submit, launch, environment=make_environment(name), now=CREATED_AT
        )
        assert isinstance(submitted, Submitted)
        launches[name] = submitted.request.id
        replica = Replica(name, name, 0, "local", ReplicaState.STOPPED, "/run/x", 1.5)
        await store.write(observing.upsert_replica, replica, now=CREATED_AT)
    stopped = EnvironmentState.STOPPED
    await store.write(observing.set_environment_state, "old", stopped, now=ENDED_AT)
    bound = old_event(dispatch)
    await store.write(observing.set_environment_state, "new", stopped, now=later)
    assert dispatch.write(retention.collect_environments, bound) == ["old"]
    environments = await store.read(queries.environments(include_stopped=True))
    assert [environment.name for environment in environments] == ["live", "new"]
    assert [replica.id for replica in await store.read(queries.replicas())] == ["live", "new"]
    last_events = await store.read(queries.LAST_EVENTS)
    assert last_events[launches["new"]] == await store.read(queries.LAST_SEQ)


async def test_events_without_a_request_go_by_age(
    dispatch: WriteConnection, store: AsyncStore
) -> None:
    replica = Replica("a", "trial", 0, "local", ReplicaState.READY, "/run/x", 1.5)
    await store.write(observing.upsert_replica, replica, now=CREATED_AT)
    bound = old_event(dispatch)
    await store.write(observing.upsert_replica, replace(replica, restarts=1), now=CREATED_AT)
    retention.collect(dispatch, bound, KEEP_ALL)
    assert [event.seq for event in await store.read(queries.events_after(0))] == [bound + 1]


def test_many_requests_are_collected_in_several_transactions(
    make_request: Make, dispatch: WriteConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    ids = [make_request(RequestState.SUCCEEDED).id for _ in range(5)]
    assert retention.collect(dispatch, old_event(dispatch), KEEP_ALL) == ids


def test_memory_estimates_are_kept_by_number_the_latest_written(
    dispatch: WriteConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_ESTIMATES", 2)
    clock_steps_back = {"a": 9.0, "b": 8.0, "c": 7.0}
    for name, at in clock_steps_back.items():
        dispatch.write(dispatching.record, learned=[MemoryEstimate(name, "", (), at)])
    dispatch.write(dispatching.record, learned=[MemoryEstimate("a", "", (), 1.0)])
    retention.collect(dispatch, 0, KEEP_ALL)
    kept = dispatch.read(queries.memory_estimates(10))
    assert [each.operation for each in kept] == ["a", "c"]
