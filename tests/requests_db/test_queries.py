# SPDX-License-Identifier: Apache-2.0
"""Looking at requests and events."""

from typing import Any

from sqlalchemy import func, select

from openenvd.requests_db.sql import queries
from openenvd.requests_db.sql.tables import requests
from openenvd.requests_db.transactions import dispatching, retention
from openenvd.schema.states import RequestState, Schedule

from .conftest import Queue

R = RequestState


def test_a_unique_prefix_of_an_id_finds_its_request_and_no_other_text(queue: Queue) -> None:
    request = queue.make()
    assert len(request.id) == 16
    for text in (request.id, request.id[:1], request.id[:5].upper()):
        assert queue.get(text) == request
    for text in ("", "xyz", "0" * 16, "%", "0" * 17, "'; --"):
        assert queue.read(queries.get(text)) == (), text


def test_requests_are_listed_newest_first_up_to_a_limit(queue: Queue) -> None:
    made = [queue.make() for _ in range(5)]
    assert queue.read(queries.list_requests(limit=2)) == made[:-3:-1]


def test_requests_are_listed_by_state_operation_and_environment(queue: Queue) -> None:
    pending = queue.make(operation="down", environment="a").id
    running = queue.make(R.RUNNING, operation="launch", environment="a").id
    failed = queue.make(R.FAILED, operation="launch", environment="b").id

    def ids(**conditions: Any) -> list[str]:
        return [request.id for request in queue.read(queries.list_requests(**conditions))]

    active = [R.PENDING, R.RUNNING]
    assert ids(states=active) == [running, pending]
    assert ids(states=[R.PENDING, R.FAILED]) == [failed, pending]
    assert ids(operation="launch") == [failed, running]
    assert ids(environment="a") == [running, pending]
    assert ids(operation="launch", environment="a", states=active) == [running]


def test_every_change_of_state_is_one_event_in_the_order_of_commits(queue: Queue) -> None:
    made = [queue.make(state) for state in RequestState]
    events = queue.read(queries.events_after(0))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for request in made:
        state = queue.get(request.id).state
        states = [e.data["state"] for e in events if e.request_id == request.id]
        assert states == [R.PENDING, R.RUNNING, state][: len(states)]
        assert states[-1] == state


def test_events_resume_after_a_number_or_are_those_of_one_request(queue: Queue) -> None:
    def seqs(after: int, **more: Any) -> list[int]:
        return [event.seq for event in queue.read(queries.events_after(after, **more))]

    assert (queue.read(queries.LAST_SEQ), seqs(0)) == (0, [])
    for _ in range(4):
        queue.make()
    assert queue.read(queries.LAST_SEQ) == 4
    assert (seqs(2), seqs(0, limit=2), seqs(4)) == ([3, 4], [1, 2], [])
    first = queue.make(R.SUCCEEDED)
    queue.make()
    ids = {e.request_id for e in queue.read(queries.events_after(0, request_id=first.id))}
    assert ids == {first.id}
    newest = queue.read(queries.newest_events(first.id, 2))
    assert [event.data["state"] for event in newest] == ["SUCCEEDED", "RUNNING"]


def test_counts_name_every_state_and_agree_with_the_rows(queue: Queue) -> None:
    assert queue.read(queries.COUNTS) == dict.fromkeys(RequestState, 0)
    for number, state in enumerate(RequestState, 1):
        for _ in range(number):
            queue.make(state)
    queue.cancel(queue.make())
    queue.release(queue.make(R.RUNNING))
    queue.write(dispatching.recover, 400.5, idempotent=set())
    retention.collect(queue, 0, 2)
    with queue.transaction() as connection:
        query = select(requests.c.state, func.count()).group_by(requests.c.state)
        real = {row[0]: row[1] for row in connection.execute(query)}
    assert queue.read(queries.COUNTS) == dict.fromkeys(RequestState, 0) | real


def test_a_place_counts_who_is_ahead_by_priority_and_arrival(queue: Queue) -> None:
    def places(limit: int) -> dict[int, int]:
        return queue.read(queries.places(Schedule.LONG, limit))

    running, first, second = (queue.make(schedule=Schedule.LONG).seq for _ in range(3))
    queue.make()
    queue.claim(schedule=Schedule.LONG)
    urgent = queue.make(schedule=Schedule.LONG, priority=1).seq
    assert places(10) == {urgent: 0, first: 1, second: 2}
    assert running not in places(10)
    assert places(2) == {urgent: 0, first: 1}
