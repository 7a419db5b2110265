# SPDX-License-Identifier: Apache-2.0
"""Submitting and cancelling, through the API's store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import Environment, NewRequest, Request
from openenvd.requests_db.results import (
    BeingUpdated,
    Cancellation,
    Duplicate,
    KeyReused,
    NameTaken,
    OtherSource,
    QueueFull,
    SubmitResult,
    Submitted,
)
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, observing, submitting
from openenvd.schema.states import (
    SERVING,
    EnvironmentState,
    GenerationState,
    RequestState,
    Schedule,
)

LAUNCH = NewRequest("launch", Schedule.LONG, {"name": "trial"}, environment="trial")
G = GenerationState
CHECK = NewRequest("check", Schedule.SHORT, {})


async def submitted(store: AsyncStore, new: NewRequest = CHECK) -> Submitted:
    result = await store.write(submitting.submit, new, now=100.5)
    assert isinstance(result, Submitted)
    return result


async def test_a_submitted_request_is_read_back_as_it_was_returned(store: AsyncStore) -> None:
    new = NewRequest(
        "launch",
        Schedule.LONG,
        {"name": "trial", "env": {"KEY": "VALUE"}},
        environment="trial",
        priority=3,
        idempotency_key="k",
        max_attempts=2,
        timeout_seconds=1.5,
    )
    result = await submitted(store, new)
    assert await store.read(queries.get(result.request.id)) == result.request
    assert result.request.state is RequestState.PENDING
    assert result.request.payload == new.payload


async def test_an_id_is_sixteen_hex_digits(store: AsyncStore) -> None:
    request = (await submitted(store)).request
    assert len(request.id) == 16
    assert int(request.id, 16) >= 0


async def test_a_submission_writes_one_event(store: AsyncStore) -> None:
    result = await submitted(store)
    assert [(e.kind, e.request_id, e.data) for e in result.events] == [
        ("request.state", result.request.id, {"state": "PENDING"})
    ]
    assert await store.read(queries.events_after(0)) == list(result.events)


async def test_any_json_payload_survives(store: AsyncStore) -> None:
    payload = {"text": "a\x00b\ud800 é \u2028", "list": [None, True, -1.5, {"": []}], "big": 2**63}
    result = await submitted(store, NewRequest("check", Schedule.SHORT, payload))
    found = await store.read(queries.get(result.request.id))
    assert isinstance(found, Request)
    assert found.payload == payload


async def test_the_same_idempotency_key_finds_the_first_request(store: AsyncStore) -> None:
    new = NewRequest("check", Schedule.SHORT, {}, idempotency_key="once")
    first = await submitted(store, new)
    assert await store.write(submitting.submit, new, now=200.5) == Duplicate(first.request)
    assert len(await store.read(queries.list_requests())) == 1


async def test_many_at_once_with_one_key_write_one_request(store: AsyncStore) -> None:
    new = NewRequest("check", Schedule.SHORT, {}, idempotency_key="once")
    results = await asyncio.gather(
        *(store.write(submitting.submit, new, now=100.5) for _ in range(20))
    )
    assert [type(result) for result in results].count(Submitted) == 1
    assert len({r.request.id for r in results if isinstance(r, Submitted | Duplicate)}) == 1


async def test_many_launches_at_once_under_one_name_yield_one(
    store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    environment = make_environment("trial")
    results = await asyncio.gather(
        *(
            store.write(submitting.submit, LAUNCH, environment=environment, now=100.5)
            for _ in range(20)
        )
    )
    assert [type(result) for result in results].count(Submitted) == 1
    assert [type(result) for result in results].count(NameTaken) == 19


async def test_the_name_of_an_ended_environment_can_be_taken(
    store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    for state in EnvironmentState:
        if state.is_live:
            continue
        first = await store.write(
            submitting.submit, LAUNCH, environment=make_environment("trial"), now=100.5
        )
        assert isinstance(first, Submitted)
        await store.write(
            observing.set_environment_state, "trial", state, address="http://x", now=150.5
        )
    await store.write(
        submitting.submit, LAUNCH, environment=make_environment("trial", now=200.5), now=200.5
    )
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert (environment.state, environment.address) == (EnvironmentState.PENDING, None)
    assert environment.created_at == 200.5


async def test_a_full_queue_takes_no_more(store: AsyncStore, dispatch: WriteConnection) -> None:
    for _ in range(3):
        await submitted(store)
    assert await store.write(submitting.submit, CHECK, now=100.5, max_pending=3) == QueueFull(3)
    assert isinstance(
        await store.write(submitting.submit, LAUNCH, now=100.5, max_pending=3), Submitted
    )
    dispatch.write(dispatching.claim, Schedule.SHORT, 1, 200.5)
    assert isinstance(
        await store.write(submitting.submit, CHECK, now=100.5, max_pending=3), Submitted
    )


async def test_a_known_key_is_found_even_in_a_full_queue(store: AsyncStore) -> None:
    new = NewRequest("check", Schedule.SHORT, {}, idempotency_key="once")
    first = await submitted(store, new)
    assert await store.write(submitting.submit, new, now=200.5, max_pending=1) == Duplicate(
        first.request
    )


async def test_a_cancelled_pending_request_is_final_at_once(
    store: AsyncStore, make_request: Callable[..., Request]
) -> None:
    request = make_request()
    result = await store.write(submitting.cancel, request.id, 400.5)
    assert result is not None
    assert result.before is RequestState.PENDING
    assert result.request.state is RequestState.CANCELLED
    assert await store.read(queries.get(request.id)) == result.request
    assert [event.data for event in result.events] == [{"state": "CANCELLED"}]


async def test_cancelling_twice_keeps_the_first_time(
    store: AsyncStore, make_request: Callable[..., Request]
) -> None:
    request = make_request(RequestState.RUNNING)
    await store.write(submitting.cancel, request.id, 400.5)
    result = await store.write(submitting.cancel, request.id, 500.5)
    assert result is not None
    assert result.before is RequestState.RUNNING
    assert result.request.cancel_requested_at == 400.5
    assert await store.read(queries.get(request.id)) == result.request


async def test_cancelling_an_ended_request_changes_nothing(
    store: AsyncStore, make_request: Callable[..., Request]
) -> None:
    for state in (RequestState.SUCCEEDED, RequestState.FAILED, RequestState.CANCELLED):
        request = make_request(state)
        before = await store.read(queries.get(request.id))
        assert isinstance(before, Request)
        assert await store.write(submitting.cancel, request.id, 400.5) == Cancellation(
            before, state
        )


async def test_cancelling_an_unknown_request_is_not_found(store: AsyncStore) -> None:
    assert await store.write(submitting.cancel, "0" * 16, 400.5) is None


async def test_a_down_marks_its_environment_and_cancels_its_launch_in_the_same_transaction(
    store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    await store.write(submitting.submit, LAUNCH, environment=make_environment("trial"), now=100.5)
    down = NewRequest("down", Schedule.SHORT, {"name": "trial"}, "trial", idempotency_key="k")
    result = await store.write(submitting.submit, down, now=101.5, stopping="trial")
    assert isinstance(result, Submitted)
    kinds = ["request.state", "environment.state", "request.state"]  # the last: its launch's
    assert [event.kind for event in result.events] == kinds
    assert result.events[-1].data == {"state": "CANCELLED"}
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert environment.state is EnvironmentState.STOPPING


async def test_a_down_that_is_not_written_leaves_its_environment_as_it_is(
    store: AsyncStore, make_environment: Callable[..., Environment]
) -> None:
    await store.write(submitting.submit, LAUNCH, environment=make_environment("trial"), now=100.5)
    await store.write(submitting.submit, CHECK, now=100.5)
    down = NewRequest("down", Schedule.SHORT, {"name": "trial"}, "trial", idempotency_key="k")
    result = await store.write(submitting.submit, down, now=101.5, stopping="trial", max_pending=1)
    assert isinstance(result, QueueFull)
    await store.write(submitting.submit, replace(CHECK, idempotency_key="k"), now=102.5)
    again = await store.write(submitting.submit, down, now=103.5, stopping="trial")
    assert isinstance(again, KeyReused)
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert environment.state is EnvironmentState.PENDING


# Updates.

SPEC = {"name": "trial", "source": "/home/me/my_env", "cwd": "/home/me", "token": "hush"}


@pytest.fixture
async def running(store: AsyncStore) -> Environment:
    """An environment that is READY."""
    await store.write(submitting.submit, launch(**SPEC), environment=named(SPEC), now=1.5)
    ready = EnvironmentState.READY
    await store.write(observing.set_environment_state, "trial", ready, address="a", now=2.5)
    found = await store.read(queries.environment("trial"))
    assert found is not None
    return found


def launch(**payload: Any) -> NewRequest:
    return NewRequest("launch", Schedule.LONG, payload, environment="trial")


def named(spec: dict[str, Any]) -> Environment:
    return Environment("trial", spec, EnvironmentState.PENDING, 100.5, 100.5)


async def relaunch(store: AsyncStore, key: str | None = None, **changes: Any) -> SubmitResult:
    new = replace(launch(**SPEC | changes), idempotency_key=key)
    return await store.write(submitting.submit, new, environment=named(new.payload), now=100.5)


async def test_a_launch_of_a_name_that_runs_is_its_next_generation_and_leaves_it_as_it_is(
    store: AsyncStore, running: Environment
) -> None:
    result = await relaunch(store, max_sessions=3)
    assert isinstance(result, Submitted)
    assert result.request.payload["replaces"] == running.request_id
    assert await store.read(queries.environment("trial")) == running
    newer, older = await store.read(queries.generations("trial"))
    assert (newer.number, newer.state, newer.request_id) == (2, G.STARTING, result.request.id)
    assert newer.spec["max_sessions"] == 3
    assert "replaces" not in newer.spec
    assert (older.number, older.state) == (1, G.SERVING)


@pytest.mark.parametrize("state", list(EnvironmentState))
async def test_what_does_not_run_is_not_updated(
    store: AsyncStore, running: Environment, state: EnvironmentState
) -> None:
    change = "UPDATE environments SET state = ?"
    await store.write(Connection.exec_driver_sql, change, (state.value,))
    result = await relaunch(store)
    if state in SERVING:
        assert isinstance(result, Submitted)
        assert result.request.payload["replaces"] == running.request_id
    elif state.is_live:
        assert isinstance(result, NameTaken)
    else:
        assert isinstance(result, Submitted)
        assert result.request.payload["replaces"] is None


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"cwd": "/elsewhere"}, Submitted),  # the folder is absolute
        ({"source": "/home/you/my_env"}, OtherSource),
        ({"source": "/home/you/my_env", "update": True}, Submitted),
        ({"update": False}, NameTaken),
    ],
)
async def test_another_source_is_an_update_only_if_that_is_said(
    store: AsyncStore, changes: dict[str, Any], outcome: type[SubmitResult]
) -> None:
    assert isinstance(await relaunch(store, **changes), outcome)


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (("echo", "/a"), ("echo", "/b"), True),
        (("mod:Class", "/a"), ("mod:Class", "/a"), True),
        (("mod:Class", "/a"), ("mod:Class", "/b"), False),
        (("./env", "/a"), ("./env", "/b"), False),
        (("docker://image:1", "/a"), ("docker://image:1", "/b"), True),
        (("docker://image:1", "/a"), ("docker://image:2", "/a"), False),
    ],
)
async def test_a_source_is_the_same_where_it_means_the_same(
    store: AsyncStore, first: tuple[str, str], second: tuple[str, str], is_same: bool
) -> None:
    spec = {"name": "trial", "source": first[0], "cwd": first[1]}
    await store.write(submitting.submit, launch(**spec), environment=named(spec), now=1.5)
    await store.write(
        observing.set_environment_state, "trial", EnvironmentState.READY, address="a", now=2.5
    )
    result = await relaunch(store, source=second[0], cwd=second[1])
    assert isinstance(result, Submitted if is_same else OtherSource)


@pytest.mark.usefixtures("running")
async def test_an_environment_is_updated_once_at_a_time(
    store: AsyncStore, dispatch: WriteConnection
) -> None:
    first = await relaunch(store)
    assert isinstance(first, Submitted)
    refused = await relaunch(store)
    assert isinstance(refused, BeingUpdated)
    assert (refused.generation.number, refused.generation.request_id) == (2, first.request.id)
    await store.write(submitting.cancel, first.request.id, 3.5)
    assert isinstance(await relaunch(store), Submitted)


@pytest.mark.usefixtures("running")
async def test_a_repeated_update_is_the_first_one(store: AsyncStore) -> None:
    first = await relaunch(store, key="once")
    assert isinstance(first, Submitted)
    assert await relaunch(store, key="once") == Duplicate(first.request)
    assert isinstance(await relaunch(store, key="once", max_sessions=7), KeyReused)


@pytest.mark.usefixtures("running")
async def test_a_down_calls_off_an_update(store: AsyncStore, dispatch: WriteConnection) -> None:
    update = await relaunch(store)
    assert isinstance(update, Submitted)
    dispatch.write(dispatching.claim, Schedule.LONG, 2, 3.5)
    down = NewRequest("down", Schedule.SHORT, {"name": "trial"}, environment="trial")
    result = await store.write(submitting.submit, down, now=4.5, stopping="trial")
    assert isinstance(result, Submitted)
    assert update.request.id in result.ends


async def test_a_generation_that_is_ready_takes_its_environment_over(
    store: AsyncStore, running: Environment
) -> None:
    update = await relaunch(store, max_sessions=3)
    assert isinstance(update, Submitted)
    [generation, _] = await store.read(queries.generations("trial"))
    switch = observing.switch_generation
    payload = update.request.payload
    events = await store.write(switch, generation, now=200.5, spec=payload, address="b")
    assert [event.data["generation"] for event in events] == [2]
    spec = {**SPEC, "max_sessions": 3}
    assert await store.read(queries.environment("trial")) == replace(
        running,
        request_id=update.request.id,
        generation=2,
        spec=spec,
        address="b",
        updated_at=200.5,
    )
    newer, older = await store.read(queries.generations("trial"))
    assert (newer.state, newer.served_at, older.state) == (G.SERVING, 200.5, G.DRAINING)


async def test_what_was_taken_down_is_not_taken_over(
    store: AsyncStore, running: Environment
) -> None:
    update = await relaunch(store)
    assert isinstance(update, Submitted)
    stopping = EnvironmentState.STOPPING
    await store.write(observing.set_environment_state, "trial", stopping, now=3.5)
    [generation, _] = await store.read(queries.generations("trial"))
    switch = observing.switch_generation
    assert await store.write(switch, generation, now=4.5, spec={}, address="b") == ()
    found = await store.read(queries.environment("trial"))
    assert found is not None
    assert (found.state, found.request_id) == (stopping, running.request_id)
