# SPDX-License-Identifier: Apache-2.0
"""What is collected, and what stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from openenvd.requests_db.records import Duplicate, MemoryEstimate, NewRequest, Replica
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import retention
from openenvd.schema.states import EnvironmentState, ReplicaState, RequestState, Schedule

from .conftest import ENDED_AT, Api, Queue, new_environment

R = RequestState
KEEP_ALL = 10**6
DAY = 86_400.0


def note_time(queue: Queue, seconds: float, age: float = DAY) -> int:
    return queue.write(retention.note_time, seconds, age)


def old_event(queue: Queue) -> int:
    """All that has happened by now is old, after one day that a daemon has run."""
    note_time(queue, 0.0)
    return note_time(queue, DAY)


@pytest.fixture(params=[0.0, -DAY, DAY], ids=["steady", "a day back", "a day ahead"])
def later(request: pytest.FixtureRequest) -> float:
    """By how much the wall clock has stepped between what is old and what is not."""
    step: float = request.param
    return ENDED_AT + step


def test_old_requests_are_collected_by_age(queue: Queue, later: float) -> None:
    old = queue.make(R.FAILED)
    bound = old_event(queue)
    queue.make(R.FAILED, ended_at=later)
    assert retention.collect(queue, bound, KEEP_ALL) == [old.id]
    assert retention.collect(queue, bound, KEEP_ALL) == []


def test_age_is_the_time_that_daemons_have_run(queue: Queue, path: Path) -> None:
    queue.make(R.FAILED)
    last = note_time(queue, 0.0, 0.0)
    assert [note_time(queue, DAY / 4) for _ in range(3)] == [0, 0, 0]
    queue.close()
    again = Queue(path)  # the next daemon goes on, whenever that is
    assert note_time(again, DAY / 4) == last
    again.close()


def test_few_marks_are_kept(queue: Queue) -> None:
    for _ in range(500):
        note_time(queue, DAY / 100)
    assert queue.sql("SELECT count(*) FROM marks") < 110


def test_the_newest_requests_are_kept_by_number_and_unfinished_ones_always(queue: Queue) -> None:
    ids = [queue.make(R.SUCCEEDED).id for _ in range(5)]
    queue.make(R.RUNNING)
    queue.make(R.PENDING)
    assert retention.collect(queue, 0, 2) == ids[:3]
    assert retention.collect(queue, old_event(queue), 0) == ids[3:]


async def test_a_key_is_kept_as_long_as_its_request(queue: Queue, api: Api) -> None:
    first = queue.make(R.SUCCEEDED, idempotency_key="once")
    same = NewRequest(first.operation, first.schedule, first.payload, idempotency_key="once")
    assert isinstance(await api.offer(same), Duplicate)
    retention.collect(queue, 0, 0)
    await api.submit(same)


def test_events_of_collected_requests_are_removed_and_their_numbers_not_reused(
    queue: Queue,
) -> None:
    request = queue.make(R.SUCCEEDED)
    last = queue.read(queries.LAST_SEQ)
    retention.collect(queue, old_event(queue), KEEP_ALL)
    assert queue.read(queries.get(request.id)) == ()
    assert queue.read(queries.events_after(0)) == []
    newer = queue.make()
    assert queue.read(queries.LAST_SEQ) == last + 1
    assert newer.seq == request.seq + 1


async def test_the_launch_of_a_live_environment_stays(queue: Queue, api: Api) -> None:
    launch = await api.launch()
    queue.claim(schedule=Schedule.LONG)
    queue.end(launch.id)
    assert retention.collect(queue, old_event(queue), 0) == []
    await api.goes(EnvironmentState.STOPPED)
    assert retention.collect(queue, old_event(queue), 0) == [launch.id]


async def test_environments_that_ended_long_ago_are_collected_with_their_replicas(
    queue: Queue, api: Api, later: float
) -> None:
    launches = {}
    for name in ("old", "new", "live"):
        launches[name] = (await api.launch(new_environment(name))).id
        await api.put(Replica(name, name, 0, "local", ReplicaState.STOPPED, "/run/x", 1.5))
    await api.goes(EnvironmentState.STOPPED, ENDED_AT, "old")
    bound = old_event(queue)
    await api.goes(EnvironmentState.STOPPED, later, "new")
    assert queue.write(retention.collect_environments, bound) == ["old"]
    environments = queue.read(queries.environments(include_stopped=True))
    assert [environment.name for environment in environments] == ["live", "new"]
    assert [replica.id for replica in queue.read(queries.replicas())] == ["live", "new"]
    last_events = queue.read(queries.LAST_EVENTS)
    assert last_events[launches["new"]] == queue.read(queries.LAST_SEQ)


async def test_events_without_a_request_go_by_age(queue: Queue, api: Api) -> None:
    replica = Replica("a", "trial", 0, "local", ReplicaState.READY, "/run/x", 1.5)
    await api.put(replica)
    bound = old_event(queue)
    await api.put(replace(replica, restarts=1))
    retention.collect(queue, bound, KEEP_ALL)
    assert [event.seq for event in queue.read(queries.events_after(0))] == [bound + 1]


def test_many_requests_are_collected_in_several_transactions(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    ids = [queue.make(R.SUCCEEDED).id for _ in range(5)]
    assert retention.collect(queue, old_event(queue), KEEP_ALL) == ids


def test_memory_estimates_are_kept_by_number_the_latest_written(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_ESTIMATES", 2)
    for name, at in {"a": 9.0, "b": 8.0, "c": 7.0}.items():  # the clock steps back
        queue.record(learned=[MemoryEstimate(name, "", (), at)])
    queue.record(learned=[MemoryEstimate("a", "", (), 1.0)])
    retention.collect(queue, 0, KEEP_ALL)
    kept = queue.read(queries.memory_estimates(10))
    assert [each.operation for each in kept] == ["a", "c"]
