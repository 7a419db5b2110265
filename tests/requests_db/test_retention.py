# SPDX-License-Identifier: Apache-2.0
"""What is collected, and what stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from openenvd.requests_db.records import Duplicate, MemoryEstimate, NewRequest, Replica
from openenvd.requests_db.sql import queries, statements
from openenvd.requests_db.transactions import retention
from openenvd.requests_db.transactions.retention import Aged, Progress
from openenvd.schema.states import EnvironmentState, ReplicaState, RequestState, Schedule

from .conftest import (
    ENDED_AT,
    EVERY_ENVIRONMENT,
    Api,
    Queue,
    collect,
    collect_environments,
    new_environment,
)

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
    assert collect(queue, bound, KEEP_ALL) == [old.id]
    assert collect(queue, bound, KEEP_ALL) == []


def test_age_is_the_time_that_daemons_have_run_by_few_marks(queue: Queue, path: Path) -> None:
    queue.make(R.FAILED)
    last = note_time(queue, 0.0, 0.0)
    assert [note_time(queue, DAY / 4) for _ in range(3)] == [0, 0, 0]
    queue.close()
    again = Queue(path)  # the next daemon goes on, whenever that is
    assert note_time(again, DAY / 4) == last
    for _ in range(500):
        note_time(again, DAY / 100)
    assert again.sql("SELECT count(*) FROM marks") < 110
    again.close()


def test_the_newest_requests_are_kept_by_number_and_unfinished_ones_always(queue: Queue) -> None:
    ids = [queue.make(R.SUCCEEDED).id for _ in range(5)]
    queue.make(R.RUNNING)
    queue.make(R.PENDING)
    assert collect(queue, 0, 2) == ids[:3]
    assert collect(queue, old_event(queue), 0) == ids[3:]


async def test_a_key_is_kept_as_long_as_its_request(queue: Queue, api: Api) -> None:
    first = queue.make(R.SUCCEEDED, idempotency_key="once")
    same = NewRequest(first.operation, first.schedule, first.payload, idempotency_key="once")
    assert isinstance(await api.offer(same), Duplicate)
    collect(queue, 0, 0)
    await api.submit(same)


def test_events_of_collected_requests_are_removed_and_their_numbers_not_reused(
    queue: Queue,
) -> None:
    request = queue.make(R.SUCCEEDED)
    last = queue.read(queries.LAST_SEQ)
    collect(queue, old_event(queue), KEEP_ALL)
    assert queue.read(queries.get(request.id)) == ()
    assert queue.read(queries.events_after(0)) == []
    newer = queue.make()
    assert queue.read(queries.LAST_SEQ) == last + 1
    assert newer.seq == request.seq + 1


async def test_the_launch_of_a_live_environment_stays(queue: Queue, api: Api) -> None:
    launch = await api.launch()
    queue.claim(schedule=Schedule.LONG)
    queue.end(launch.id)
    assert collect(queue, old_event(queue), 0) == []
    await api.goes(EnvironmentState.STOPPED)
    assert collect(queue, old_event(queue), 0) == [launch.id]


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
    assert collect_environments(queue, bound) == ["old"]
    environments = queue.read(EVERY_ENVIRONMENT)
    assert [environment.name for environment in environments] == ["live", "new"]
    assert [*queue.read(queries.REPLICAS_OF_EACH)] == ["live", "new"]
    ages = retention.Ages(queue)
    list(ages.read())
    [last_events] = ages.of_logs(list(launches.values()))
    assert last_events[launches["new"]] == queue.read(queries.LAST_SEQ)
    assert last_events[launches["old"]] < bound  # its launch alone is known still
    assert last_events.keys() == set(launches.values())


async def test_an_environment_that_ended_stays_while_a_request_names_it(
    queue: Queue, api: Api
) -> None:
    await api.launch(new_environment("trial"))
    await api.goes(EnvironmentState.STOPPED)
    queue.make(R.FAILED, environment="trial")
    bound = old_event(queue)
    later = queue.make(R.FAILED, environment="trial")
    assert collect_environments(queue, bound) == []
    assert later.id not in collect(queue, bound, KEEP_ALL)
    assert collect_environments(queue, queue.read(queries.LAST_SEQ)) == ["trial"]


async def test_events_without_a_request_go_by_age(queue: Queue, api: Api) -> None:
    replica = Replica("a", "trial", 0, "local", ReplicaState.READY, "/run/x", 1.5)
    await api.put(replica)
    bound = old_event(queue)
    await api.put(replace(replica, restarts=1))
    collect(queue, bound, KEEP_ALL)
    assert [event.seq for event in queue.read(queries.events_after(0))] == [bound + 1]


def test_requests_after_the_first_one_to_keep_are_not_looked_at(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 1)
    old = [queue.make(R.SUCCEEDED).id for _ in range(2)]
    bound = old_event(queue)
    for _ in range(10):
        queue.make(R.SUCCEEDED)
    assert list(retention.collect(queue, bound, 10)) == [[old[0]], [old[1]], []]
    assert list(retention.collect(queue, bound, 9))[1:] == [[]]


def aged(seq: int, first: int, last: int, state: str = "SUCCEEDED", **more: bool) -> Aged:
    return Aged(str(seq), seq, state, first, last, more.get("is_kept", False))


@pytest.mark.parametrize(
    ("rows", "excess", "chosen", "is_over"),
    [
        ([aged(1, 1, 9), aged(2, 2, 10)], 0, [1], False),  # by the last event, which is event 9
        ([aged(1, 1, 20), aged(2, 2, 21)], 1, [1], False),  # too many
        ([aged(1, 1, 9, "RUNNING"), aged(2, 2, 20)], 1, [2], False),  # those that have ended
        ([aged(1, 1, 9, is_kept=True), aged(2, 2, 9)], 1, [2], False),
        ([aged(1, 10, 11), aged(2, 12, 12)], 1, [1], True),  # the next one is too new
        ([aged(1, 1, 9), aged(2, 10, 11), aged(3, 4, 5)], 0, [1], True),  # so are all after it
        ([], 5, [], True),
    ],
)
def test_which_requests_are_removed(
    rows: list[Aged], excess: int, chosen: list[int], is_over: bool
) -> None:
    progress = Progress(old_event=9, excess=excess)
    assert [row.seq for row in progress.choose(rows)] == chosen
    assert progress.is_over is is_over


def test_a_step_reads_the_events_of_few_requests_whatever_there_is(queue: Queue) -> None:
    """SQLite's query plan uses indexes, and scans no table."""
    for statement, keys in (
        (statements.AGED_REQUESTS, ("after_seq", "up_to")),
        (statements.EVENTS_OF_NONE, ("after_seq", "up_to")),
        (statements.DELETE_OLD_EVENTS, ("old", "up_to")),
    ):
        prepared = queries.prepare(statement, keys)
        with queue.transaction() as connection:
            values = prepared.values(dict.fromkeys(keys, 0))
            explain = f"EXPLAIN QUERY PLAN {prepared.text}"
            plan = connection.exec_driver_sql(explain, values).all()
        read = [step for *_, step in plan if step.startswith(("SCAN events", "SCAN requests"))]
        assert read == [], plan


def test_memory_estimates_are_kept_by_number_the_latest_written(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_ESTIMATES", 2)
    for name, at in {"a": 9.0, "b": 8.0, "c": 7.0}.items():  # the clock steps back
        queue.record(learned=[MemoryEstimate(name, "", (), at)])
    queue.record(learned=[MemoryEstimate("a", "", (), 1.0)])
    collect(queue, 0, KEEP_ALL)
    kept = queue.read(queries.memory_estimates(10))
    assert [each.operation for each in kept] == ["a", "c"]
