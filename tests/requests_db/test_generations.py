# SPDX-License-Identifier: Apache-2.0
"""The history of an environment follows its launches and its states."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from openenvd.requests_db.records import Generation, Replica, RequestError
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import observing, submitting
from openenvd.schema.states import (
    GENERATION_TRANSITIONS,
    EnvironmentState,
    ErrorKind,
    GenerationState,
    ReplicaState,
    RequestState,
    Schedule,
)
from openenvd.system.text.safe_text import REDACTED

from .conftest import Api, Queue, collect, collect_environments, new_environment

E, G = EnvironmentState, GenerationState
ERROR = RequestError(ErrorKind.WORKER_LOST, "it is gone")


async def test_a_launch_begins_a_generation_whose_spec_has_no_secrets(api: Api) -> None:
    spec: dict[str, Any] = {
        "source": "echo",
        "token": "hush",
        "env": {"API_KEY": "hush", "LEVEL": "3"},
    }
    launch = await api.launch(new_environment(**spec))
    hidden = {"token": REDACTED, "env": {"API_KEY": REDACTED, "LEVEL": "3"}}
    [found] = await api.generations()
    assert found == Generation("trial", 1, launch.id, spec | hidden, G.STARTING, 100.5)
    environment = await api.environment()
    assert (environment.spec, environment.generation) == (spec, 1)


async def test_a_launch_that_failed_is_all_that_is_known_of_its_name_until_the_next(
    api: Api, queue: Queue
) -> None:
    launch = await api.launch()
    queue.claim(schedule=Schedule.LONG)
    queue.end(launch.id, RequestState.FAILED, error=ERROR)
    await api.goes(E.FAILED)
    [failed] = await api.read(queries.never_launched(10))
    assert (failed.id, failed.environment) == (launch.id, "trial")
    assert await api.read(queries.LAUNCHED_ENVIRONMENTS) == []
    await api.launch()
    assert await api.read(queries.never_launched(10)) == []
    assert [each.name for each in await api.read(queries.LAUNCHED_ENVIRONMENTS)] == ["trial"]


async def test_of_many_launches_that_failed_the_newest_are_read_and_all_counted(
    api: Api, queue: Queue
) -> None:
    for name in ("one", "two", "three"):
        launch = await api.launch(new_environment(name))
        queue.claim(schedule=Schedule.LONG)
        queue.end(launch.id, RequestState.FAILED, error=ERROR)
        await api.goes(E.FAILED, name=name)
    await api.launch(new_environment("serves"))
    newest = await api.read(queries.never_launched(2))
    assert [request.environment for request in newest] == ["three", "two"]
    assert await api.read(queries.NEVER_LAUNCHED_COUNT) == 3
    assert [each.name for each in await api.read(queries.LAUNCHED_ENVIRONMENTS)] == ["serves"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([E.READY, E.DEGRADED, E.READY], (G.SERVING, 0, None, None)),
        ([E.READY, E.STOPPING, E.STOPPED], (G.RETIRED, 0, 2, None)),
        ([E.STOPPED], (G.FAILED, None, 0, observing.CANCELLED)),  # it was called off
        ([E.FAILED, (E.FAILED, ERROR)], (G.FAILED, None, 1, "it is gone")),  # explained later
    ],
)
async def test_a_generation_follows_its_environment(
    api: Api, states: list[Any], expected: tuple[Any, ...]
) -> None:
    await api.launch()
    for now, state in enumerate(states):
        state, error = state if isinstance(state, tuple) else (state, None)
        await api.goes(state, now, error=error)
    [found] = await api.generations()
    assert (found.state, found.served_at, found.ended_at, found.error) == expected


async def test_a_generation_that_was_taken_down_as_soon_as_it_was_ready_has_served(
    api: Api, queue: Queue
) -> None:
    launch = await api.launch()
    queue.claim(schedule=Schedule.LONG)
    queue.end(launch.id)
    await api.goes(E.STOPPED, 4.5)
    [found] = await api.generations()
    assert (found.state, found.served_at, found.error) == (G.RETIRED, 4.5, None)


async def test_a_generation_that_has_ended_keeps_no_row_of_its_replicas(api: Api) -> None:
    launch = await api.launch()
    own = Replica(f"trial-0-{launch.id}", "trial", 0, "local", ReplicaState.READY, "/run/a", 1.5)
    await api.put(own)
    await api.put(replace(own, id="trial-1-earlier", ordinal=1, run_dir="/run/b"))
    [generation] = await api.generations()
    await api.write(observing.end_generation, generation, G.FAILED, now=2.5, error="it is gone")
    assert [each.id for each in await api.read(queries.replicas("trial"))] == ["trial-1-earlier"]


async def test_each_launch_of_a_name_is_its_next_generation_and_the_newest_are_kept(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "KEPT", 3)
    for _ in range(5):
        await api.launch()
        await api.goes(E.STOPPED)
    assert (await api.environment()).generation == 5
    assert [generation.number for generation in await api.generations()] == [5, 4, 3]


async def test_the_launches_of_an_environments_history_are_kept_until_it_is_down_and_go_with_it(
    api: Api, queue: Queue
) -> None:
    launches = []
    for _ in range(2):
        launches.append((await api.launch()).id)
        await api.write(submitting.cancel, launches[-1], 2.5)
        await api.goes(E.FAILED)
    assert collect(queue, 0, 0) == []
    await api.goes(E.STOPPED)
    assert collect(queue, 0, 0) == launches
    last = await api.read(queries.LAST_SEQ)
    assert collect_environments(queue, last) == ["trial"]
    assert await api.generations() == []


@pytest.mark.parametrize(("before", "after"), list(product(G, G)))
async def test_a_generation_moves_exactly_where_the_table_allows(
    api: Api, queue: Queue, before: GenerationState, after: GenerationState
) -> None:
    await api.launch()
    queue.sql("UPDATE generations SET state = ?", (before.value,))
    queue.write(observing.move, "trial", 1, after, 2.5)
    moves = after in GENERATION_TRANSITIONS[before]
    if before is G.STARTING and after is G.RETIRED:
        after = G.FAILED  # its launch has not succeeded
    [found] = await api.generations()
    assert found.state is (after if moves else before)
