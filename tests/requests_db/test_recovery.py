# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests whose daemon was lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import Request
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, recovery, submitting
from openenvd.requests_db.transactions.recovery import next_state
from openenvd.schema.states import ErrorKind, RequestState, Schedule

Make = Callable[..., Request]

AGAIN = frozenset({"launch"})


def lost(**fields: object) -> Request:
    values: dict[str, object] = {"operation": "launch", "attempts": 1, "max_attempts": 2} | fields
    return Request(
        id="7f3a",
        schedule=Schedule.LONG,
        payload={},
        state=RequestState.RUNNING,
        created_at=1.5,
        **values,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (lost(), RequestState.PENDING),
        (lost(attempts=2), RequestState.PENDING),
        (lost(lost_daemons=9), RequestState.PENDING),
        (lost(lost_daemons=10), RequestState.FAILED),
        (lost(operation="down"), RequestState.FAILED),
        (lost(cancel_requested_at=2.5), RequestState.CANCELLED),
        (lost(operation="down", cancel_requested_at=2.5), RequestState.CANCELLED),
    ],
    ids=[
        "idempotent",
        "its last attempt",
        "nine daemons lost",
        "ten daemons lost",
        "not idempotent",
        "to be cancelled",
        "both",
    ],
)
def test_the_next_state_of_a_lost_request(request_: Request, expected: RequestState) -> None:
    assert next_state(request_, AGAIN) is expected


def test_running_names_the_workers_of_a_lost_daemon(
    make_request: Make, dispatch: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING)
    make_request()
    dispatch.write(dispatching.record, started=[(request.id, "short-1", 4711, 190.5, 201.5)])
    [found] = dispatch.read(queries.RUNNING)
    assert (found.id, found.worker, found.started_at) == (request.id, "short-1", 201.5)
    assert (found.worker_pid, found.worker_started_at) == (4711, 190.5)


def test_an_idempotent_request_is_queued_again_and_forgets_its_worker(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING, operation="launch", max_attempts=2)
    dispatch.write(dispatching.record, started=[(request.id, "short-1", 4711, 190.5, 201.5)])
    recovered = dispatch.write(recovery.recover, 400.5, idempotent=AGAIN)
    [requeued] = recovered.requeued
    with writer.transaction() as connection:
        assert queries.get(request.id).run(connection) == requeued
    assert requeued.state is RequestState.PENDING
    assert (requeued.worker, requeued.worker_pid, requeued.started_at) == (None, None, None)
    assert [event.data for event in recovered.events] == [{"state": "PENDING"}]


def test_lost_daemons_do_not_count_as_attempts(
    make_request: Make, dispatch: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING, operation="launch", max_attempts=3)
    for lost_daemons in (1, 2):
        [requeued] = dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).requeued
        assert (requeued.attempts, requeued.lost_daemons) == (0, lost_daemons)
        [again] = dispatch.write(dispatching.claim, request.schedule, 1, 500.5).requests
        assert (again.id, again.attempts) == (request.id, 1)


def test_what_ends_every_daemon_is_given_up(make_request: Make, dispatch: WriteConnection) -> None:
    request = make_request(RequestState.RUNNING, operation="launch")
    for _ in range(10):
        assert dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).requeued
        dispatch.write(dispatching.claim, request.schedule, 1, 500.5)
    [failed] = dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).failed
    assert failed.error is not None
    assert failed.error.message.endswith("while this request ran, 11 times in all")


def test_a_request_that_is_not_idempotent_fails_as_lost(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING, operation="down")
    [failed] = dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).failed
    with writer.transaction() as connection:
        assert queries.get(request.id).run(connection) == failed
    assert failed.error is not None
    assert failed.error.kind is ErrorKind.WORKER_LOST
    assert failed.finished_at == 400.5


def test_a_lost_request_that_was_to_be_cancelled_is_cancelled(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING, operation="launch", max_attempts=2)
    with writer.transaction() as connection:
        submitting.cancel(connection, request.id, 300.5)
    [cancelled] = dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).cancelled
    assert (cancelled.id, cancelled.state) == (request.id, RequestState.CANCELLED)


def test_recovery_touches_running_requests_alone_and_once(
    make_request: Make, dispatch: WriteConnection
) -> None:
    for state in RequestState:
        make_request(state)
    assert len(dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).failed) == 1
    assert dispatch.write(recovery.recover, 400.5, idempotent=AGAIN).events == ()
