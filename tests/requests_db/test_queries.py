# SPDX-License-Identifier: Apache-2.0
"""Looking at requests and events, through the API's store."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import func, select

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import Request
from openenvd.requests_db.sql import queries
from openenvd.requests_db.sql.tables import requests
from openenvd.requests_db.transactions import dispatching, recovery, retention, submitting
from openenvd.schema.states import RequestState

Make = Callable[..., Request]


async def test_a_unique_prefix_of_an_id_finds_its_request(
    store: AsyncStore, make_request: Make
) -> None:
    request = make_request()
    assert await store.read(queries.get(request.id)) == request
    assert await store.read(queries.get(request.id[:1])) == request
    assert await store.read(queries.get(request.id[:5].upper())) == request


async def test_an_ambiguous_prefix_names_the_ids_that_have_it(
    store: AsyncStore, make_request: Make
) -> None:
    ids = [make_request().id for _ in range(17)]  # two of them begin with the same digit
    digit = next(d for d in "0123456789abcdef" if sum(id_[0] == d for id_ in ids) > 1)
    found = await store.read(queries.get(digit))
    assert isinstance(found, tuple)
    assert set(found) == {id_ for id_ in ids if id_[0] == digit}


async def test_a_text_that_cannot_be_an_id_is_not_found(
    store: AsyncStore, make_request: Make
) -> None:
    make_request()
    for text in ("", "xyz", "0" * 16, "%", "0" * 17, "'; --"):
        assert await store.read(queries.get(text)) == ()


async def test_requests_are_listed_newest_first_up_to_a_limit(
    store: AsyncStore, make_request: Make
) -> None:
    made = [make_request() for _ in range(5)]
    first = await store.read(queries.list_requests(limit=2))
    assert first == list(reversed(made))[:2]


async def test_requests_are_listed_by_state_operation_and_environment(
    store: AsyncStore, make_request: Make
) -> None:
    pending = make_request(operation="down", environment="a")
    running = make_request(RequestState.RUNNING, operation="launch", environment="a")
    failed = make_request(RequestState.FAILED, operation="launch", environment="b")

    async def ids(**conditions: object) -> list[str]:
        found = await store.read(queries.list_requests(**conditions))  # type: ignore[arg-type]
        return [request.id for request in found]

    active = [RequestState.PENDING, RequestState.RUNNING]
    assert await ids(states=active) == [running.id, pending.id]
    assert await ids(states=[RequestState.PENDING, RequestState.FAILED]) == [failed.id, pending.id]
    assert await ids(operation="launch") == [failed.id, running.id]
    assert await ids(environment="a") == [running.id, pending.id]
    assert await ids(operation="launch", environment="a", states=active) == [running.id]


async def test_every_change_of_state_is_one_event_in_the_order_of_commits(
    store: AsyncStore, make_request: Make
) -> None:
    requests_ = [make_request(state) for state in RequestState]
    events = await store.read(queries.events_after(0))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for request in requests_:
        found = await store.read(queries.get(request.id))
        assert isinstance(found, Request)
        states = [e.data["state"] for e in events if e.request_id == request.id]
        expected = [RequestState.PENDING, RequestState.RUNNING, found.state]
        assert states == expected[: len(states)]
        assert states[-1] == found.state


async def test_events_resume_after_a_number(store: AsyncStore, make_request: Make) -> None:
    for _ in range(4):
        make_request()
    last = await store.read(queries.LAST_SEQ)
    assert last == 4
    assert [event.seq for event in await store.read(queries.events_after(2))] == [3, 4]
    assert [event.seq for event in await store.read(queries.events_after(0, limit=2))] == [1, 2]
    assert await store.read(queries.events_after(last)) == []


async def test_events_of_one_request_alone(store: AsyncStore, make_request: Make) -> None:
    first = make_request(environment="a")
    make_request(environment="b")
    assert [
        e.request_id for e in await store.read(queries.events_after(0, request_id=first.id))
    ] == [first.id]


async def test_the_newest_events_of_one_request(store: AsyncStore, make_request: Make) -> None:
    first = make_request(RequestState.SUCCEEDED)
    make_request()
    newest = await store.read(queries.newest_events(first.id, 2))
    assert [event.data["state"] for event in newest] == ["SUCCEEDED", "RUNNING"]


async def test_a_new_database_has_no_events(store: AsyncStore) -> None:
    assert await store.read(queries.LAST_SEQ) == 0
    assert await store.read(queries.events_after(0)) == []


async def test_counts_name_every_state_and_agree_with_the_rows(
    store: AsyncStore, dispatch: WriteConnection, make_request: Make, writer: WriteConnection
) -> None:
    assert await store.read(queries.COUNTS) == dict.fromkeys(RequestState, 0)
    for number, state in enumerate(RequestState, 1):
        for _ in range(number):
            make_request(state)
    await store.write(submitting.cancel, make_request().id, 400.5)
    dispatch.write(dispatching.release, [make_request(RequestState.RUNNING).id], 400.5)
    dispatch.write(recovery.recover, 400.5, idempotent=set())
    retention.collect(dispatch, 0, 2)
    with writer.transaction() as connection:
        query = select(requests.c.state, func.count()).group_by(requests.c.state)
        real = {row[0]: row[1] for row in connection.execute(query)}
    assert await store.read(queries.COUNTS) == dict.fromkeys(RequestState, 0) | real
