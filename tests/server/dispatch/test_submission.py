# SPDX-License-Identifier: Apache-2.0
"""From an accepted payload to a durable request, over the real tables."""

from __future__ import annotations

from typing import Any, cast

import pytest
from sqlalchemy import Connection

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.errors import DatabaseError
from openenvd.requests_db.records import Event, Outcome, Request
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, observing
from openenvd.schema.settings import Settings
from openenvd.schema.states import EnvironmentState, RequestState, Schedule
from openenvd.server.dispatch.submission import Submission, Submitter
from openenvd.server.errors import (
    AmbiguousId,
    CannotChange,
    Invalid,
    KeyReused,
    NameTaken,
    NotFound,
    QueueFull,
)
from openenvd.server.events.bus import EventBus
from openenvd.server.operations import registry


class FakeDispatcher:
    """The part of a dispatcher, and of its claimer, that a submitter calls."""

    def __init__(self) -> None:
        self.claimer = self
        self.submitted_to: list[Schedule] = []
        self.cancelled: list[str] = []

    def submitted(self, schedule: Schedule) -> None:
        self.submitted_to.append(schedule)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


@pytest.fixture
def dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture
def submitter(store: AsyncStore, bus: EventBus, dispatcher: FakeDispatcher) -> Submitter:
    return Submitter(store, cast(Any, dispatcher), bus, Settings(max_pending=3))


async def submit(submitter: Submitter, operation: str, **payload: Any) -> Request:
    key = payload.pop("key", None)
    made = registry.by_name(operation).Payload(**payload).model_dump(mode="json")
    return await submitter.submit(Submission(registry.by_name(operation), made, key))


async def state_of(store: AsyncStore, name: str) -> EnvironmentState:
    environment = await store.read(queries.environment(name))
    assert environment is not None
    return environment.state


async def test_a_submitted_request_is_stored_published_and_wakes_the_dispatcher(
    submitter: Submitter, store: AsyncStore, dispatcher: FakeDispatcher, bus: EventBus
) -> None:
    with bus.subscribe() as subscription:
        request = await submit(submitter, "check")
    assert await store.read(queries.get(request.id)) == request
    assert dispatcher.submitted_to == [Schedule.SHORT]
    assert [event.request_id for event in subscription.take()] == [request.id]


async def test_a_launch_takes_the_name_with_its_request(
    submitter: Submitter, store: AsyncStore
) -> None:
    request = await submit(submitter, "launch", source="echo")
    environment = await store.read(queries.environment("echo"))
    assert environment is not None
    assert (environment.request_id, environment.state) == (request.id, EnvironmentState.PENDING)
    with pytest.raises(NameTaken, match="echo is pending already"):
        await submit(submitter, "launch", source="echo")


@pytest.mark.parametrize("name", ["../up", "a/b", "-x", "two words", "x" * 64])
async def test_a_name_that_cannot_be_a_path_is_refused(
    submitter: Submitter, store: AsyncStore, name: str
) -> None:
    with pytest.raises(Invalid):
        await submit(submitter, "launch", source="echo", name=name)
    assert await store.read(queries.list_requests()) == []


async def test_a_queue_full_of_launches_still_takes_a_down(
    submitter: Submitter, store: AsyncStore
) -> None:
    for name in ("echo", "second", "third"):
        await submit(submitter, "launch", source="echo", name=name)
    with pytest.raises(QueueFull, match="3 LONG requests are waiting already"):
        await submit(submitter, "launch", source="echo", name="other")
    await submit(submitter, "check")
    await submit(submitter, "down", name="echo")
    assert await state_of(store, "echo") is EnvironmentState.STOPPING


async def test_a_down_ends_a_launch_that_runs(
    submitter: Submitter, dispatch: WriteConnection, dispatcher: FakeDispatcher
) -> None:
    launch = await submit(submitter, "launch", source="echo")
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 2.0)
    await submit(submitter, "down", name="echo")
    assert dispatcher.cancelled == [launch.id]


async def test_a_down_whose_launch_cannot_be_cancelled_is_not_written(
    submitter: Submitter, store: AsyncStore
) -> None:
    """Otherwise the API would answer that it failed, and write it again when it is repeated."""
    launch = await submit(submitter, "launch", source="echo")
    refuse = (
        "CREATE TRIGGER refuse BEFORE UPDATE ON requests WHEN NEW.state = 'CANCELLED'"
        " BEGIN SELECT RAISE(ABORT, 'not now'); END"
    )
    await store.write(Connection.exec_driver_sql, refuse)
    with pytest.raises(DatabaseError):
        await submit(submitter, "down", name="echo")
    assert await store.read(queries.list_requests()) == [launch]
    assert await state_of(store, "echo") is EnvironmentState.PENDING


async def test_a_repeated_down_returns_the_first_one(
    submitter: Submitter, store: AsyncStore
) -> None:
    await submit(submitter, "launch", source="echo")
    first = await submit(submitter, "down", name="echo", key="once")
    await store.write(observing.set_environment_state, "echo", EnvironmentState.STOPPED, now=3.0)
    assert (await submit(submitter, "down", name="echo", key="once")).id == first.id
    with pytest.raises(NotFound, match="taken down already"):
        await submit(submitter, "down", name="echo")
    again = await submit(submitter, "launch", source="echo")
    assert (await submit(submitter, "down", name="echo", key="once")).id == first.id
    assert (await submitter.find(again.id)).state is RequestState.PENDING
    assert await state_of(store, "echo") is EnvironmentState.PENDING


async def test_a_down_of_an_unknown_environment_names_near_matches(submitter: Submitter) -> None:
    await submit(submitter, "launch", source="echo", name="trial")
    with pytest.raises(NotFound) as caught:
        await submit(submitter, "down", name="trail")
    assert caught.value.details["near"] == ["trial"]


async def test_a_down_cannot_be_cancelled(submitter: Submitter) -> None:
    await submit(submitter, "launch", source="echo")
    down = await submit(submitter, "down", name="echo")
    with pytest.raises(Invalid, match="cannot be cancelled"):
        await submitter.cancel(down.id)


async def test_a_pending_request_is_cancelled_without_the_dispatcher(
    submitter: Submitter, dispatcher: FakeDispatcher, bus: EventBus
) -> None:
    request = await submit(submitter, "check")
    with bus.subscribe(request_id=request.id) as subscription:
        cancelled = await submitter.cancel(request.id)
    assert (cancelled.request.state, cancelled.is_done) == (RequestState.CANCELLED, True)
    assert dispatcher.cancelled == []
    [event] = subscription.take()
    assert isinstance(event, Event)
    again = await submitter.cancel(request.id)
    assert (again.request, again.is_done) == (cancelled.request, False)


async def test_a_cancelled_request_that_succeeds_first_was_never_called_cancelled(
    submitter: Submitter, dispatch: WriteConnection
) -> None:
    request = await submit(submitter, "check")
    dispatch.write(dispatching.claim, Schedule.SHORT, 1, 2.0)
    asked = await submitter.cancel(request.id)
    assert (asked.is_done, asked.is_under_way) == (False, True)
    dispatch.write(dispatching.record, outcomes=[Outcome(request.id, RequestState.SUCCEEDED, 3.0)])
    assert (await submitter.find(request.id)).state is RequestState.SUCCEEDED
    asked = await submitter.cancel(request.id)
    assert (asked.is_done, asked.is_under_way) == (False, False)


async def test_a_key_that_was_used_for_something_else_is_refused(
    submitter: Submitter, store: AsyncStore
) -> None:
    first = await submit(submitter, "launch", source="echo", key="once")
    with pytest.raises(KeyReused, match=f"'once' is that of launch echo .request {first.id}") as e:
        await submit(submitter, "down", name="echo", key="once")
    assert "cannot be used for down echo" in e.value.message
    assert e.value.details == {"request_id": first.id, "operation": "launch"}
    with pytest.raises(KeyReused, match="cannot be used for launch echo with another payload"):
        await submit(submitter, "launch", source="echo", max_sessions=3, key="once")
    assert (await submit(submitter, "launch", source="echo", key="once")).id == first.id
    assert await store.read(queries.list_requests()) == [first]
    assert await state_of(store, "echo") is EnvironmentState.PENDING


async def test_an_id_may_be_shortened_while_only_one_fits(submitter: Submitter) -> None:
    requests = [await submit(submitter, "check") for _ in range(3)]
    assert await submitter.find(requests[0].id[:12]) == requests[0]
    with pytest.raises(NotFound):
        await submitter.find("not-an-id")


async def test_a_prefix_of_several_names_them(submitter: Submitter) -> None:
    big = Submitter(submitter.store, submitter.dispatcher, submitter.bus, Settings())
    ids = [(await submit(big, "check")).id for _ in range(17)]  # of 16 first digits
    first = [i[0] for i in ids]
    twice = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(AmbiguousId) as caught:
        await submitter.find(twice)
    assert set(caught.value.details["matches"]) == {i for i in ids if i[0] == twice}


async def launched(submitter: Submitter, store: AsyncStore, dispatch: WriteConnection) -> Request:
    """An environment whose launch has succeeded."""
    launch = await submit(submitter, "launch", source="echo")
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 1.0)
    dispatch.write(dispatching.record, outcomes=[Outcome(launch.id, RequestState.SUCCEEDED, 2.0)])
    ready = EnvironmentState.READY
    for state in (EnvironmentState.STARTING, ready):
        await store.write(observing.set_environment_state, "echo", state, now=2.0)
    return launch


@pytest.mark.parametrize("operation", ["scale", "restart"])
async def test_one_request_at_a_time_changes_an_environment(
    submitter: Submitter, store: AsyncStore, dispatch: WriteConnection, operation: str
) -> None:
    change = {"name": "echo"} | ({"replicas": 2} if operation == "scale" else {})
    with pytest.raises(NotFound, match="no environment is called 'echo'") as unknown:
        await submit(submitter, operation, **change)
    assert unknown.value.hint == "none runs; openenv launch SOURCE starts one"
    launch = await submit(submitter, "launch", source="echo")
    told = rf"^echo is being launched already \(request {launch.id}\)$"
    with pytest.raises(CannotChange, match=told) as refused:
        await submit(submitter, operation, **change)
    assert refused.value.hint == f"wait for that: openenv wait {launch.id}"
    await submit(submitter, "down", name="echo")
    with pytest.raises(CannotChange, match="echo is being taken down already"):
        await submit(submitter, operation, **change)


async def test_a_change_waits_for_no_other_and_a_down_calls_it_off(
    submitter: Submitter,
    store: AsyncStore,
    dispatch: WriteConnection,
    dispatcher: FakeDispatcher,
) -> None:
    await launched(submitter, store, dispatch)
    scale = await submit(submitter, "scale", name="echo", replicas=2)
    with pytest.raises(CannotChange, match=rf"echo is being scaled already \(request {scale.id}"):
        await submit(submitter, "restart", name="echo")
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 3.0)
    await submit(submitter, "down", name="echo")
    assert dispatcher.cancelled == [scale.id]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (EnvironmentState.FAILED, "echo is not running: it has failed"),
        (EnvironmentState.STOPPED, "echo is not running"),
    ],
)
async def test_what_does_not_run_is_not_changed(
    submitter: Submitter,
    store: AsyncStore,
    dispatch: WriteConnection,
    state: EnvironmentState,
    told: str,
) -> None:
    launch = await launched(submitter, store, dispatch)
    await store.write(observing.set_environment_state, "echo", state, now=3.0)
    with pytest.raises(CannotChange, match=f"^{told}$") as refused:
        await submit(submitter, "scale", name="echo", replicas=2)
    assert refused.value.hint == f"launch it again: openenv retry {launch.id}"


async def test_what_cannot_be_retried_is_to_be_launched(
    submitter: Submitter, store: AsyncStore, dispatch: WriteConnection
) -> None:
    launch = await launched(submitter, store, dispatch)
    await store.write(observing.set_environment_state, "echo", EnvironmentState.STOPPED, now=3.0)
    forget = "DELETE FROM requests WHERE id = ?"
    await store.write(Connection.exec_driver_sql, forget, (launch.id,))
    with pytest.raises(CannotChange) as refused:
        await submit(submitter, "scale", name="echo", replicas=2)
    assert refused.value.hint == "launch it again: openenv launch SOURCE"


@pytest.mark.parametrize("operation", ["scale", "restart"])
async def test_a_launch_that_has_just_succeeded_can_be_changed_at_once(
    submitter: Submitter, store: AsyncStore, dispatch: WriteConnection, operation: str
) -> None:
    launch = await submit(submitter, "launch", source="echo")
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 1.0)
    await store.write(
        observing.set_environment_state, "echo", EnvironmentState.STARTING, now=1.0
    )  # and the reconciler has not looked since
    dispatch.write(dispatching.record, outcomes=[Outcome(launch.id, RequestState.SUCCEEDED, 2.0)])
    change = {"name": "echo"} | ({"replicas": 2} if operation == "scale" else {})
    assert (await submit(submitter, operation, **change)).state is RequestState.PENDING


async def test_what_is_going_down_is_waited_for(
    submitter: Submitter, store: AsyncStore, dispatch: WriteConnection
) -> None:
    await launched(submitter, store, dispatch)
    await store.write(observing.set_environment_state, "echo", EnvironmentState.STOPPING, now=3.0)
    with pytest.raises(CannotChange, match=r"^echo is being taken down$") as refused:
        await submit(submitter, "scale", name="echo", replicas=2)
    assert refused.value.hint == (
        "wait until it is down (openenv status echo), then launch it again"
    )
