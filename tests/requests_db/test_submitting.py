# SPDX-License-Identifier: Apache-2.0
"""Submitting and cancelling, through the API's store."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from openenvd.requests_db import records
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import observing, submitting
from openenvd.schema import states

from .conftest import CHECK, DOWN, LAUNCH, Api, Queue, new_environment

E, G, R = states.EnvironmentState, states.GenerationState, states.RequestState
ONCE = replace(CHECK, idempotency_key="once")


async def test_a_submitted_request_is_read_back_as_it_was_returned(api: Api) -> None:
    new = records.NewRequest(
        "launch",
        states.Schedule.LONG,
        {"text": "a\x00b\ud800 é \u2028", "list": [None, True, -1.5, {"": []}], "big": 2**63},
        environment="trial",
        priority=3,
        idempotency_key="k",
        max_attempts=2,
        timeout_seconds=1.5,
    )
    result = await api.submit(new)
    assert await api.read(queries.get(result.request.id)) == result.request
    assert (result.request.state, result.request.payload) == (R.PENDING, new.payload)
    assert len(result.request.id) == 16
    assert int(result.request.id, 16) >= 0


async def test_the_same_key_finds_the_first_request_even_in_a_full_queue(api: Api) -> None:
    first = records.Duplicate((await api.submit(ONCE)).request)
    assert await api.offer(ONCE, now=200.5) == first
    assert await api.offer(ONCE, now=200.5, max_pending=1) == first
    assert len(await api.read(queries.list_requests())) == 1


async def test_many_at_once_with_one_key_write_one_request(api: Api) -> None:
    results = await asyncio.gather(*(api.offer(ONCE) for _ in range(20)))
    assert [type(result) for result in results].count(records.Submitted) == 1
    assert (
        len({r.request.id for r in results if isinstance(r, records.Submitted | records.Duplicate)})
        == 1
    )


async def test_many_launches_at_once_under_one_name_yield_one(api: Api) -> None:
    trial = new_environment()
    results = await asyncio.gather(*(api.offer(LAUNCH, environment=trial) for _ in range(20)))
    assert [type(result) for result in results].count(records.Submitted) == 1
    assert [type(result) for result in results].count(records.NameTaken) == 19


async def test_the_name_of_an_ended_environment_can_be_taken(api: Api) -> None:
    for state in states.EnvironmentState:
        if not state.is_live:
            await api.launch()
            await api.goes(state, address="http://x")
    await api.launch(now=200.5)
    found = await api.environment()
    assert (found.state, found.address, found.created_at) == (E.PENDING, None, 200.5)


async def cancel(api: Api, request_id: str, now: float = 400.5) -> records.Cancellation:
    result = await api.write(submitting.cancel, request_id, now)
    assert result is not None
    return result


async def test_cancelling_keeps_the_first_time_and_changes_nothing_ended_or_unknown(
    api: Api, queue: Queue
) -> None:
    request = queue.make(R.RUNNING)
    await cancel(api, request.id)
    result = await cancel(api, request.id, 500.5)
    assert (result.before, result.request.cancel_requested_at) == (R.RUNNING, 400.5)
    assert queue.get(request.id) == result.request
    for state in (R.SUCCEEDED, R.FAILED, R.CANCELLED):
        before = queue.get(queue.make(state).id)
        assert await cancel(api, before.id) == records.Cancellation(before, state)
    assert await api.write(submitting.cancel, "0" * 16, 400.5) is None


async def test_a_down_that_is_written_stops_its_environment_and_its_launch(api: Api) -> None:
    await api.launch()
    await api.submit()
    down = replace(DOWN, idempotency_key="once")
    assert isinstance(await api.offer(down, stopping="trial", max_pending=1), records.QueueFull)
    await api.submit(ONCE)
    assert isinstance(await api.offer(down, stopping="trial"), records.KeyReused)
    assert (await api.environment()).state is E.PENDING
    result = await api.offer(DOWN, stopping="trial")
    assert isinstance(result, records.Submitted)
    kinds = ["request.state", "environment.state", "request.state"]  # the last: its launch's
    assert [event.kind for event in result.events] == kinds
    assert result.events[-1].data == {"state": "CANCELLED"}
    assert (await api.environment()).state is E.STOPPING


# Updates.

SPEC: dict[str, Any] = {"source": "/home/me/my_env", "cwd": "/home/me", "token": "hush"}


@pytest.fixture
async def running(api: Api) -> records.Environment:
    await api.launch(new_environment(**SPEC))
    await api.goes(E.READY, address="a")
    return await api.environment()


async def relaunch(api: Api, key: str | None = None, **changes: Any) -> records.SubmitResult:
    trial = new_environment(**{**SPEC, **changes})
    new = records.NewRequest(
        "launch", states.Schedule.LONG, trial.spec, "trial", idempotency_key=key
    )
    return await api.offer(new, environment=trial)


async def updated(api: Api, **changes: Any) -> records.Submitted:
    result = await relaunch(api, **changes)
    assert isinstance(result, records.Submitted)
    return result


async def test_a_launch_of_a_name_that_runs_is_its_next_generation_and_leaves_it_as_it_is(
    api: Api, running: records.Environment
) -> None:
    result = await updated(api, max_sessions=3)
    assert result.request.payload["replaces"] == running.request_id
    assert await api.environment() == running
    newer, older = await api.generations()
    assert (newer.number, newer.state, newer.request_id) == (2, G.STARTING, result.request.id)
    assert newer.spec["max_sessions"] == 3
    assert "replaces" not in newer.spec
    assert (older.number, older.state) == (1, G.SERVING)


@pytest.mark.parametrize("state", states.EnvironmentState)
async def test_what_does_not_run_is_not_updated(
    api: Api, running: records.Environment, state: states.EnvironmentState
) -> None:
    await api.sql("UPDATE environments SET state = ?", (state.value,))
    result = await relaunch(api)
    if state.is_live and state not in states.SERVING:
        assert isinstance(result, records.NameTaken)
        return
    assert isinstance(result, records.Submitted)
    replaced = running.request_id if state in states.SERVING else None
    assert result.request.payload["replaces"] == replaced


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
async def test_a_launch_that_has_ended_without_success_gives_its_name_back_at_once(
    api: Api, state: str
) -> None:
    """The reconciler writes a moment later that the environment has failed."""
    launch = await api.launch(new_environment())
    await api.sql(
        "UPDATE requests SET state = ?, finished_at = 1.0 WHERE id = ?", (state, launch.id)
    )
    result = await relaunch(api)
    assert isinstance(result, records.Submitted)
    assert (await api.environment()).request_id == result.request.id


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"cwd": "/elsewhere"}, records.Submitted),  # the folder is absolute
        ({"source": "/home/you/my_env"}, records.OtherSource),
        ({"source": "/home/you/my_env", "update": True}, records.Submitted),
        ({"update": False}, records.NameTaken),
    ],
)
async def test_another_source_is_an_update_only_if_that_is_said(
    api: Api, changes: dict[str, Any], outcome: type[records.SubmitResult]
) -> None:
    assert isinstance(await relaunch(api, **changes), outcome)


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
    api: Api, first: tuple[str, str], second: tuple[str, str], is_same: bool
) -> None:
    await api.launch(new_environment(source=first[0], cwd=first[1]))
    await api.goes(E.READY)
    result = await relaunch(api, source=second[0], cwd=second[1])
    assert isinstance(result, records.Submitted if is_same else records.OtherSource)


@pytest.mark.usefixtures("running")
async def test_an_environment_is_updated_once_at_a_time(api: Api) -> None:
    first = await updated(api)
    refused = await relaunch(api)
    assert isinstance(refused, records.BeingUpdated)
    assert (refused.generation.number, refused.generation.request_id) == (2, first.request.id)
    await cancel(api, first.request.id)
    await updated(api)


@pytest.mark.usefixtures("running")
async def test_a_repeated_update_is_the_first_one(api: Api) -> None:
    first = await updated(api, key="once")
    assert await relaunch(api, key="once") == records.Duplicate(first.request)
    assert isinstance(await relaunch(api, key="once", max_sessions=7), records.KeyReused)


async def test_a_generation_that_is_ready_takes_its_environment_over(
    api: Api, running: records.Environment
) -> None:
    request = (await updated(api, max_sessions=3)).request
    [generation, _] = await api.generations()
    switch = observing.switch_generation
    events = await api.write(switch, generation, now=200.5, spec=request.payload, address="b")
    assert [event.data["generation"] for event in events] == [2]
    changes: dict[str, Any] = {"spec": {**SPEC, "max_sessions": 3}, "request_id": request.id}
    changes |= {"generation": 2, "address": "b", "updated_at": 200.5}
    assert await api.environment() == replace(running, **changes)
    newer, older = await api.generations()
    assert (newer.state, newer.served_at, older.state) == (G.SERVING, 200.5, G.DRAINING)


async def test_what_was_taken_down_is_not_taken_over(
    api: Api, running: records.Environment
) -> None:
    await updated(api)
    await api.goes(E.STOPPING)
    [generation, _] = await api.generations()
    switch = observing.switch_generation
    assert await api.write(switch, generation, now=4.5, spec={}, address="b") == ()
    found = await api.environment()
    assert (found.state, found.request_id) == (E.STOPPING, running.request_id)
