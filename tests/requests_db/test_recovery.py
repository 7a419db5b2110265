# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests whose daemon was lost."""

from __future__ import annotations

from typing import Any

import pytest

from openenvd.requests_db.records import Request
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching
from openenvd.requests_db.transactions.dispatching import next_state
from openenvd.schema.states import ErrorKind, RequestState, Schedule

from .conftest import Queue

R = RequestState
AGAIN = frozenset({"launch"})


def recover(queue: Queue) -> list[Request]:
    return queue.write(dispatching.recover, 400.5, idempotent=AGAIN)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, R.PENDING),
        ({"attempts": 2}, R.PENDING),  # its last attempt
        ({"lost_daemons": 9}, R.PENDING),
        ({"lost_daemons": 10}, R.FAILED),
        ({"operation": "down"}, R.FAILED),  # not idempotent
        ({"cancel_requested_at": 2.5}, R.CANCELLED),
        ({"operation": "down", "cancel_requested_at": 2.5}, R.CANCELLED),
    ],
)
def test_the_next_state_of_a_lost_request(fields: dict[str, Any], expected: R) -> None:
    known: dict[str, Any] = {"operation": "launch", "attempts": 1, "max_attempts": 2, **fields}
    lost = Request(
        id="7f3a", schedule=Schedule.LONG, payload={}, state=R.RUNNING, created_at=1.5, **known
    )
    assert next_state(lost, AGAIN) is expected


def test_running_names_the_workers_of_a_lost_daemon_and_a_requeued_request_forgets_its_own(
    queue: Queue,
) -> None:
    request = queue.make(R.RUNNING, operation="launch", max_attempts=2)
    queue.make()
    queue.record(started=[(request.id, "short-1", 4711, 190.5, 201.5)])
    [found] = queue.read(queries.RUNNING)
    assert (found.id, found.worker, found.started_at) == (request.id, "short-1", 201.5)
    assert (found.worker_pid, found.worker_started_at) == (4711, 190.5)
    [requeued] = recover(queue)
    assert queue.get(request.id) == requeued
    assert requeued.state is R.PENDING
    assert (requeued.worker, requeued.worker_pid, requeued.started_at) == (None, None, None)
    [event] = queue.read(queries.newest_events(request.id, 1))
    assert event.data == {"state": "PENDING"}


def test_lost_daemons_do_not_count_as_attempts_and_what_ends_every_daemon_is_given_up(
    queue: Queue,
) -> None:
    request = queue.make(R.RUNNING, operation="launch", max_attempts=3)
    for lost_daemons in range(1, 11):
        [requeued] = recover(queue)
        assert (requeued.attempts, requeued.lost_daemons) == (0, lost_daemons)
        [again] = queue.claim().requests
        assert (again.id, again.attempts) == (request.id, 1)
    [failed] = recover(queue)
    assert failed.error is not None
    assert failed.error.message.endswith("while this request ran, 11 times in all")


def test_a_request_that_is_not_idempotent_fails_as_lost(queue: Queue) -> None:
    request = queue.make(R.RUNNING, operation="down")
    [failed] = recover(queue)
    assert queue.get(request.id) == failed
    assert failed.error is not None
    assert (failed.error.kind, failed.finished_at) == (ErrorKind.WORKER_LOST, 400.5)


def test_recovery_touches_running_requests_alone_and_once(queue: Queue) -> None:
    for state in RequestState:
        queue.make(state)
    assert [request.state for request in recover(queue)] == [R.FAILED]
    assert recover(queue) == []
