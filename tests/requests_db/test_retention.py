# SPDX-License-Identifier: Apache-2.0
"""What is collected, and what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.dispatch_store import DispatchStore
from openenvd.requests_db.records import Environment, NewRequest, Outcome, Replica, Request
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.states import EnvironmentState, ReplicaState, RequestState, Schedule
from openenvd.requests_db.transactions import observing, retention, submitting

Make = Callable[..., Request]

LONG_AGO, LATELY, NOW = 1_000.5, 9_000.5, 10_000.5
KEEP_ALL = 10**6
DAY = 5_000.0  # in these tests


def test_old_requests_are_collected_by_age(make_request: Make, dispatch: DispatchStore) -> None:
    old = make_request(RequestState.FAILED, ended_at=LONG_AGO)
    make_request(RequestState.FAILED, ended_at=LATELY)
    assert dispatch.collect(NOW, KEEP_ALL, DAY) == [old.id]
    assert dispatch.collect(NOW, KEEP_ALL, DAY) == []


def test_the_newest_requests_are_kept_by_number(
    make_request: Make, dispatch: DispatchStore
) -> None:
    ids = [make_request(RequestState.SUCCEEDED, ended_at=LATELY).id for _ in range(5)]
    assert dispatch.collect(NOW, 2, DAY) == ids[:3]


def test_unfinished_requests_always_stay(make_request: Make, dispatch: DispatchStore) -> None:
    make_request(RequestState.RUNNING)
    make_request(RequestState.PENDING)
    assert dispatch.collect(NOW, 0, 0.0) == []


async def test_events_of_collected_requests_are_removed_and_their_numbers_not_reused(
    make_request: Make, dispatch: DispatchStore, store: AsyncStore
) -> None:
    request = make_request(RequestState.SUCCEEDED, ended_at=LONG_AGO)
    last = await store.read(queries.last_seq())
    dispatch.collect(NOW, KEEP_ALL, DAY)
    assert await store.read(queries.get(request.id)) == ()
    assert await store.read(queries.events_after(0)) == []
    newer = make_request()
    assert await store.read(queries.last_seq()) == last + 1
    assert newer.seq == request.seq + 1


async def test_the_launch_of_a_live_environment_stays(
    dispatch: DispatchStore, store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    launch = NewRequest("launch", Schedule.LONG, {}, environment="trial")
    result = await store.write(
        submitting.submit, launch, environment=make_environment("trial"), now=LONG_AGO
    )
    assert isinstance(result, Submitted)
    dispatch.claim(Schedule.LONG, 1, LONG_AGO)
    dispatch.record(outcomes=[Outcome(result.request.id, RequestState.SUCCEEDED, LONG_AGO)])
    assert dispatch.collect(NOW, 0, DAY) == []
    await store.write(
        observing.set_environment_state, "trial", EnvironmentState.STOPPED, now=LATELY
    )
    assert dispatch.collect(NOW, 0, DAY) == [result.request.id]


async def test_environments_that_ended_long_ago_are_collected_with_their_replicas(
    dispatch: DispatchStore, store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    launch = NewRequest("launch", Schedule.LONG, {}, environment="x")
    for name, ended_at in (("old", LONG_AGO), ("new", LATELY)):
        await store.write(
            submitting.submit, launch, environment=make_environment(name), now=LONG_AGO
        )
        replica = Replica(name, name, 0, "local", ReplicaState.STOPPED, "/run/x", 1.5)
        await store.write(observing.upsert_replica, replica, now=LONG_AGO)
        await store.write(
            observing.set_environment_state, name, EnvironmentState.STOPPED, now=ended_at
        )
    await store.write(submitting.submit, launch, environment=make_environment("live"), now=LONG_AGO)
    assert dispatch.collect_environments(NOW, DAY) == ["old"]
    assert [e.name for e in await store.read(queries.environments(include_stopped=True))] == [
        "live",
        "new",
    ]
    assert [replica.id for replica in await store.read(queries.replicas())] == ["new"]


async def test_events_without_a_request_go_by_age(
    dispatch: DispatchStore, store: AsyncStore
) -> None:
    replica = Replica("a", "trial", 0, "local", ReplicaState.READY, "/run/x", 1.5)
    await store.write(observing.upsert_replica, replica, now=LONG_AGO)
    dispatch.collect(NOW, KEEP_ALL, DAY)
    assert await store.read(queries.events_after(0)) == []


def test_many_requests_are_collected_in_several_transactions(
    make_request: Make, dispatch: DispatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    ids = [make_request(RequestState.SUCCEEDED, ended_at=LONG_AGO).id for _ in range(5)]
    assert dispatch.collect(NOW, KEEP_ALL, DAY) == ids
