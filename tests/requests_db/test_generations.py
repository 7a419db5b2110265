# SPDX-License-Identifier: Apache-2.0
"""The history of an environment follows its launches and its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import Environment, Generation, NewRequest, Outcome, RequestError
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import (
    dispatching,
    generations,
    observing,
    retention,
    submitting,
)
from openenvd.schema.states import (
    GENERATION_TRANSITIONS,
    EnvironmentState,
    ErrorKind,
    GenerationState,
    RequestState,
    Schedule,
)
from openenvd.system.text.hidden_values import REDACTED

E, G = EnvironmentState, GenerationState
ERROR = RequestError(ErrorKind.WORKER_LOST, "it is gone")
MakeEnvironment = Callable[..., Environment]


async def launch(store: AsyncStore, environment: Environment, now: float = 100.5) -> str:
    """A launch of the environment is submitted."""
    new = NewRequest("launch", Schedule.LONG, environment.spec, environment=environment.name)
    result = await store.write(submitting.submit, new, environment=environment, now=now)
    assert isinstance(result, Submitted)
    return result.request.id


async def goes(
    store: AsyncStore, state: EnvironmentState, now: float, error: RequestError | None = None
) -> None:
    """The environment goes to this state."""
    await store.write(observing.set_environment_state, "trial", state, now=now, error=error)


async def newest(store: AsyncStore) -> Generation:
    """The newest generation."""
    return (await store.read(queries.generations("trial")))[0]


async def test_a_launch_begins_a_generation_whose_spec_has_no_secrets(
    store: AsyncStore, make_environment: MakeEnvironment
) -> None:
    spec = {"source": "echo", "token": "hush", "env": {"API_KEY": "hush", "LEVEL": "3"}}
    request_id = await launch(store, replace(make_environment(), spec=spec))
    hidden = {"token": REDACTED, "env": {"API_KEY": REDACTED, "LEVEL": "3"}}
    assert await newest(store) == Generation(
        "trial", 1, request_id, spec | hidden, G.STARTING, 100.5
    )
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert (environment.spec, environment.generation) == (spec, 1)


async def test_a_launch_that_failed_is_all_that_is_known_of_its_name_until_the_next(
    store: AsyncStore, dispatch: WriteConnection, make_environment: MakeEnvironment
) -> None:
    request_id = await launch(store, make_environment())
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 101.5)
    outcome = Outcome(request_id, RequestState.FAILED, 102.5, error=ERROR)
    dispatch.write(dispatching.record, outcomes=[outcome])
    await goes(store, E.FAILED, 103.5)
    [failed] = await store.read(queries.NEVER_LAUNCHED)
    assert (failed.id, failed.environment) == (request_id, "trial")
    await launch(store, make_environment(), 104.5)
    assert await store.read(queries.NEVER_LAUNCHED) == []


async def test_a_generation_serves_while_its_environment_is_ready_or_degraded(
    store: AsyncStore, make_environment: MakeEnvironment
) -> None:
    await launch(store, make_environment())
    await goes(store, E.READY, 2.5)
    await goes(store, E.DEGRADED, 3.5)
    await goes(store, E.READY, 4.5)
    found = await newest(store)
    assert (found.state, found.served_at, found.ended_at) == (G.SERVING, 2.5, None)


async def test_a_generation_retires_with_its_environment(
    store: AsyncStore, make_environment: MakeEnvironment
) -> None:
    await launch(store, make_environment())
    for now, state in enumerate((E.READY, E.STOPPING, E.STOPPED)):
        await goes(store, state, now)
    found = await newest(store)
    assert (found.state, found.served_at, found.ended_at) == (G.RETIRED, 0, 2)


async def test_a_generation_that_was_called_off_says_so(
    store: AsyncStore, make_environment: MakeEnvironment
) -> None:
    await launch(store, make_environment())
    await goes(store, E.STOPPED, 2.5)
    found = await newest(store)
    assert (found.state, found.error) == (G.FAILED, generations.CANCELLED)


async def test_a_generation_that_was_taken_down_as_soon_as_it_was_ready_has_served(
    store: AsyncStore, dispatch: WriteConnection, make_environment: MakeEnvironment
) -> None:
    request_id = await launch(store, make_environment())
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 2.5)
    dispatch.write(dispatching.record, outcomes=[Outcome(request_id, RequestState.SUCCEEDED, 3.5)])
    await goes(store, E.STOPPED, 4.5)
    found = await newest(store)
    assert (found.state, found.served_at, found.error) == (G.RETIRED, 4.5, None)


async def test_a_generation_fails_for_the_reason_of_its_environment(
    store: AsyncStore, make_environment: MakeEnvironment
) -> None:
    await launch(store, make_environment())
    await goes(store, E.FAILED, 2.5)
    await goes(store, E.FAILED, 3.5, error=ERROR)  # it is explained a moment later
    found = await newest(store)
    assert (found.state, found.error) == (G.FAILED, "it is gone")


async def test_each_launch_of_a_name_is_its_next_generation_and_the_newest_are_kept(
    store: AsyncStore, make_environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "KEPT", 3)
    for _ in range(5):
        await launch(store, make_environment())
        await goes(store, E.STOPPED, 2.5)
    environment = await store.read(queries.environment("trial"))
    assert environment is not None
    assert environment.generation == 5
    history = await store.read(queries.generations("trial"))
    assert [generation.number for generation in history] == [5, 4, 3]


async def test_the_launches_of_an_environments_history_are_kept_until_it_is_down(
    store: AsyncStore, dispatch: WriteConnection, make_environment: MakeEnvironment
) -> None:
    launches = []
    for _ in range(2):
        launches.append(await launch(store, make_environment()))
        await store.write(submitting.cancel, launches[-1], 2.5)
        await goes(store, E.FAILED, 2.5)
    assert retention.collect(dispatch, 0, keep_requests=0) == []
    await goes(store, E.STOPPED, 3.5)
    assert retention.collect(dispatch, 0, keep_requests=0) == launches


async def test_the_history_goes_with_its_environment(
    store: AsyncStore, dispatch: WriteConnection, make_environment: MakeEnvironment
) -> None:
    await launch(store, make_environment())
    await goes(store, E.STOPPED, 2.5)
    assert dispatch.write(retention.collect_environments, await store.read(queries.LAST_SEQ)) == [
        "trial"
    ]
    assert await store.read(queries.generations("trial")) == []


@pytest.mark.parametrize(("before", "after"), list(product(G, G)))
async def test_a_generation_moves_exactly_where_the_table_allows(
    before: GenerationState,
    after: GenerationState,
    store: AsyncStore,
    writer: WriteConnection,
    make_environment: MakeEnvironment,
) -> None:
    await launch(store, make_environment())
    with writer.transaction() as connection:
        connection.exec_driver_sql("UPDATE generations SET state = ?", (before.value,))
        generations.move(connection, "trial", 1, after, 2.5)
    moves = after in GENERATION_TRANSITIONS[before]
    if before is G.STARTING and after is G.RETIRED:
        after = G.FAILED  # its launch has not succeeded
    assert (await newest(store)).state is (after if moves else before)
