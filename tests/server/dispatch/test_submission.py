# SPDX-License-Identifier: Apache-2.0
"""From an accepted payload to a durable request, over the real tables."""

import re
from typing import Any, cast

import pytest
from sqlalchemy import Connection

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.errors import DatabaseError
from openenvd.requests_db.records import Outcome, Request
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, observing
from openenvd.schema.settings import Settings
from openenvd.schema.states import EnvironmentState, RequestState, Schedule
from openenvd.server import errors
from openenvd.server.dispatch.submission import Submitter, request_of
from openenvd.server.events import EventBus
from openenvd.server.operations import registry

E = EnvironmentState


class Desk:
    """A submitter over real tables, and what it asks of the dispatcher and its claimer."""

    def __init__(self, store: AsyncStore, bus: EventBus, dispatch: WriteConnection) -> None:
        self.store, self.bus, self.dispatch, self.claimer = store, bus, dispatch, self
        self.submitted_to: list[Schedule] = []
        self.cancelled: list[str] = []
        self.submitter = Submitter(store, cast(Any, self), bus, Settings(max_pending=3))

    def submitted(self, schedule: Schedule) -> None:
        self.submitted_to.append(schedule)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def submit(self, operation: str, **payload: Any) -> Request:
        key, found = payload.pop("key", None), registry.OPERATIONS[operation]
        made = found.Payload(**payload).model_dump(mode="json")
        return await self.submitter.submit(request_of(found, made, idempotency_key=key))

    async def launch(self, **payload: Any) -> Request:
        return await self.submit("launch", source="echo", **payload)

    async def down(self, **payload: Any) -> Request:
        return await self.submit("down", name="echo", **payload)

    async def change(self, operation: str = "scale") -> Request:
        of_its_own: dict[str, dict[str, Any]] = {
            "launch": {"source": "echo"},
            "scale": {"replicas": 2},
        }
        return await self.submit(operation, name="echo", **of_its_own.get(operation, {}))

    def claim(self, schedule: Schedule = Schedule.LONG) -> None:
        self.dispatch.write(dispatching.claim, schedule, 1, 2.0)

    def succeed(self, request: Request) -> None:
        outcome = Outcome(request.id, RequestState.SUCCEEDED, 3.0)
        self.dispatch.write(dispatching.record, outcomes=[outcome])

    async def goes(self, *states: EnvironmentState) -> None:
        for state in states:
            await self.store.write(observing.set_environment_state, "echo", state, now=2.0)

    async def launched(self) -> Request:
        launch = await self.launch()
        self.claim()
        self.succeed(launch)
        await self.goes(E.STARTING, E.READY)
        return launch

    async def state(self) -> EnvironmentState:
        environment = await self.store.read(queries.environment("echo"))
        assert environment is not None
        return environment.state

    async def requests(self) -> list[Request]:
        return await self.store.read(queries.list_requests())


@pytest.fixture
async def desk(store: AsyncStore, bus: EventBus, dispatch: WriteConnection) -> Desk:
    return Desk(store, bus, dispatch)


async def test_a_submitted_request_wakes_the_dispatcher_or_is_cancelled(desk: Desk) -> None:
    with desk.bus.subscribe() as subscription:
        request = await desk.submit("check")
    assert await desk.requests() == [request]
    assert desk.submitted_to == [Schedule.SHORT]
    assert [event.request_id for event in subscription.take()] == [request.id]
    with desk.bus.subscribe(request_id=request.id) as subscription:
        cancelled = await desk.submitter.cancel(request.id)
    assert (cancelled.request.state, cancelled.before) == (
        RequestState.CANCELLED,
        RequestState.PENDING,
    )
    assert (desk.cancelled, len(subscription.take())) == ([], 1)
    again = await desk.submitter.cancel(request.id)
    assert (again.request, again.before) == (cancelled.request, RequestState.CANCELLED)


async def test_a_launch_that_is_submitted_again_keeps_the_replicas_that_it_was_scaled_to(
    desk: Desk,
) -> None:
    launch = await desk.launched()
    await desk.store.write(observing.set_replicas, "echo", 3, now=2.0)
    again = await desk.submitter.retry(launch.id, {"memory_mb": 300})
    kept = {name: again.payload[name] for name in ("replicas", "memory_mb", "update")}
    assert kept == {"replicas": 3, "memory_mb": 300, "update": True}


async def test_a_launch_takes_the_name_with_its_request(desk: Desk) -> None:
    request = await desk.launch()
    environment = await desk.store.read(queries.environment("echo"))
    assert environment is not None
    assert (environment.request_id, environment.state) == (request.id, E.PENDING)
    with pytest.raises(errors.NameTaken, match="echo is pending already") as caught:
        await desk.launch()
    assert caught.value.hint == f"wait for that: openenv wait {request.id}"


async def test_a_queue_full_of_launches_still_takes_a_down_and_after_a_claim_a_launch(
    desk: Desk,
) -> None:
    for name in ("echo", "second", "third"):
        await desk.launch(name=name)
    with pytest.raises(errors.QueueFull, match="the queue has 3 LONG requests already"):
        await desk.launch(name="other")
    await desk.submit("check")
    desk.claim()
    await desk.launch(name="other")
    await desk.down()
    assert await desk.state() is E.STOPPING


async def test_a_down_ends_a_launch_that_runs_and_cannot_be_cancelled_itself(desk: Desk) -> None:
    launch = await desk.launch()
    desk.claim()
    down = await desk.down()
    assert desk.cancelled == [launch.id]
    with pytest.raises(errors.Invalid, match="cannot be cancelled"):
        await desk.submitter.cancel(down.id)


async def test_a_down_whose_launch_cannot_be_cancelled_is_not_written(desk: Desk) -> None:
    """Otherwise the API would answer that it failed, and write it again when it is repeated."""
    launch = await desk.launch()
    refuse = (
        "CREATE TRIGGER refuse BEFORE UPDATE ON requests WHEN NEW.state = 'CANCELLED'"
        " BEGIN SELECT RAISE(ABORT, 'not now'); END"
    )
    await desk.store.write(Connection.exec_driver_sql, refuse)
    with pytest.raises(DatabaseError):
        await desk.down()
    assert await desk.requests() == [launch]
    assert await desk.state() is E.PENDING


async def test_a_repeated_down_returns_the_first_one(desk: Desk) -> None:
    await desk.launch()
    first = await desk.down(key="once")
    await desk.goes(E.STOPPED)
    assert (await desk.down(key="once")).id == first.id
    with pytest.raises(errors.NotFound, match="taken down already"):
        await desk.down()
    again = await desk.launch()
    assert (await desk.down(key="once")).id == first.id
    assert (await desk.submitter.find(again.id)).state is RequestState.PENDING
    assert await desk.state() is E.PENDING


async def test_a_down_of_an_unknown_environment_names_near_matches(desk: Desk) -> None:
    await desk.launch(name="trial")
    with pytest.raises(errors.NotFound) as caught:
        await desk.submit("down", name="trail")
    assert caught.value.details["near"] == ["trial"]


async def test_a_cancelled_request_that_succeeds_first_was_never_called_cancelled(
    desk: Desk,
) -> None:
    request = await desk.submit("check")
    desk.claim(Schedule.SHORT)
    asked = await desk.submitter.cancel(request.id)
    assert asked.before is RequestState.RUNNING
    desk.succeed(request)
    assert (await desk.submitter.find(request.id)).state is RequestState.SUCCEEDED
    asked = await desk.submitter.cancel(request.id)
    assert asked.before is RequestState.SUCCEEDED


async def test_a_key_that_was_used_for_something_else_is_refused(desk: Desk) -> None:
    first = await desk.launch(key="once")
    with pytest.raises(
        errors.KeyReused, match=f"'once' is that of launch echo .request {first.id}"
    ) as e:
        await desk.down(key="once")
    assert "cannot be used for down echo" in e.value.message
    assert e.value.details == {"request_id": first.id, "operation": "launch"}
    with pytest.raises(
        errors.KeyReused, match="cannot be used for launch echo with another payload"
    ):
        await desk.launch(max_sessions=3, key="once")
    assert (await desk.launch(key="once")).id == first.id
    assert await desk.requests() == [first]
    assert await desk.state() is E.PENDING


async def test_an_id_may_be_shortened_while_only_one_fits_and_of_several_they_are_named(
    desk: Desk,
) -> None:
    desk.submitter = Submitter(desk.store, cast(Any, desk), desk.bus, Settings())
    made = [await desk.submit("check") for _ in range(17)]  # of 16 first digits
    assert await desk.submitter.find(made[0].id[:12]) == made[0]
    with pytest.raises(errors.NotFound):
        await desk.submitter.find("not-an-id")
    first = [each.id[0] for each in made]
    twice = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(errors.AmbiguousId) as caught:
        await desk.submitter.find(twice)
    assert set(caught.value.details["matches"]) == {r.id for r in made if r.id[0] == twice}


LAUNCHED, SCALED = "has a launch under way already", "has a scale under way already"
RESTARTED, STOPPED = "has a restart under way already", "has a down under way already"
CHANGES = ("launch", "scale", "restart")
UNDER_WAY = {  # and what is told to each of the changes that meets it
    "launch": ("is being updated to generation 2 already", LAUNCHED, LAUNCHED),
    "scale": (SCALED, SCALED, SCALED),
    "restart": (RESTARTED, RESTARTED, RESTARTED),
    "down": ("is stopping already", STOPPED, STOPPED),
}


@pytest.mark.parametrize("first", UNDER_WAY)
async def test_a_change_that_meets_another_is_refused_and_a_down_calls_that_off(
    desk: Desk, first: str
) -> None:
    await desk.launched()
    request = await desk.change(first)
    for second, told in zip(CHANGES, UNDER_WAY[first], strict=True):
        with pytest.raises(
            (errors.CannotChange, errors.NameTaken), match=rf"^echo {told}"
        ) as refused:
            await desk.change(second)
        if refused.type is errors.CannotChange:
            assert refused.value.message.endswith(f" (request {request.id})")
            assert refused.value.hint == f"wait for that: openenv wait {request.id}"
    desk.claim()
    assert (await desk.down()).state is RequestState.PENDING
    assert desk.cancelled == ([] if first == "down" else [request.id])


@pytest.mark.parametrize("operation", CHANGES)
async def test_a_generation_that_drains_keeps_nobody_from_a_change(
    desk: Desk, operation: str
) -> None:
    await desk.launched()
    update = await desk.launch()
    desk.claim()
    [generation, _] = await desk.store.read(queries.generations("echo"))
    switch = observing.switch_generation
    await desk.store.write(switch, generation, now=2.0, spec=update.payload, address="b")
    desk.succeed(update)
    assert (await desk.change(operation)).state is RequestState.PENDING


@pytest.mark.parametrize("operation", ["scale", "restart"])
async def test_what_is_launched_can_be_changed_no_sooner(desk: Desk, operation: str) -> None:
    with pytest.raises(errors.NotFound, match="no environment is called 'echo'") as unknown:
        await desk.change(operation)
    assert unknown.value.hint == "none runs; openenv launch SOURCE starts one"
    launch = await desk.launch()
    with pytest.raises(errors.CannotChange, match=rf"^echo {LAUNCHED} \(request {launch.id}\)$"):
        await desk.change(operation)
    desk.claim()
    await desk.goes(E.STARTING)  # and the reconciler has not looked since
    desk.succeed(launch)
    assert (await desk.change(operation)).state is RequestState.PENDING


@pytest.mark.parametrize(
    ("state", "told", "hint"),
    [
        (E.FAILED, "echo is not running: it has failed", "launch it again: openenv retry {id}"),
        (E.STOPPED, "echo is not running", "launch it again: openenv retry {id}"),
        # Its launch has been collected.
        (E.STOPPED, "echo is not running", "launch it again: openenv launch SOURCE"),
        (
            E.STOPPING,
            "echo is being taken down",
            "wait until it is down (openenv status echo), then launch it again",
        ),
    ],
)
async def test_what_does_not_run_is_not_changed(
    desk: Desk, state: EnvironmentState, told: str, hint: str
) -> None:
    launch = await desk.launched()
    await desk.goes(state)
    if hint.endswith("SOURCE"):
        forget = "DELETE FROM requests WHERE id = ?"
        await desk.store.write(Connection.exec_driver_sql, forget, (launch.id,))
    with pytest.raises(errors.CannotChange, match=f"^{re.escape(told)}$") as refused:
        await desk.change()
    assert refused.value.hint == hint.format(id=launch.id)
