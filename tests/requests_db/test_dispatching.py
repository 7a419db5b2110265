# SPDX-License-Identifier: Apache-2.0
"""Claiming, recording and releasing, through the dispatcher's connection."""

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Executable

from openenvd.requests_db.records import (
    MemoryEstimate,
    Outcome,
    PeakSample,
    Request,
    RequestError,
    Retry,
)
from openenvd.requests_db.sql import queries, statements
from openenvd.requests_db.sql.rows import PRIORITY_STEP_SECONDS, QueueClock
from openenvd.requests_db.transactions import dispatching
from openenvd.requests_db.transactions.dispatching import next_state
from openenvd.schema.states import ErrorKind, InvalidTransition, RequestState, Schedule

from .conftest import Queue

R = RequestState


def pending(queue: Queue, limit: int = 10, schedule: Schedule = Schedule.SHORT) -> list[str]:
    return [request.id for request in queue.read(queries.first_pending(schedule, limit))]


def data_of(events: Any) -> list[Any]:
    return [event.data for event in events]


def test_claim_takes_a_higher_priority_and_the_oldest_of_its_schedule(queue: Queue) -> None:
    ids = [queue.make().id for _ in range(5)]
    assert (pending(queue, 2), pending(queue)) == (ids[:2], ids)  # which claims nothing
    assert (queue.claimed(3), queue.claimed(3)) == (ids[:3], ids[3:])
    low, high, lowest = (queue.make(priority=p).id for p in (0, 5, -5))
    assert queue.claimed(3) == [high, low, lowest]
    request = queue.make(schedule=Schedule.LONG)
    assert queue.claimed(3) == []
    assert pending(queue, schedule=Schedule.LONG) == [request.id]


def test_a_claimed_request_runs_and_a_released_one_keeps_its_place(queue: Queue) -> None:
    request = queue.make(payload={"a": 1})
    claim = queue.claim(3)
    assert claim.requests == (queue.get(request.id),)
    [claimed] = claim.requests
    assert (claimed.state, claimed.attempts, claimed.started_at) == (R.RUNNING, 1, 200.5)
    assert data_of(claim.events) == [{"state": "RUNNING"}]
    first, second = queue.make(), queue.make()
    queue.claim()
    assert data_of(queue.release(first)) == [{"state": "PENDING"}]
    assert queue.get(first.id) == first
    assert queue.claimed(2) == [first.id, second.id]


def test_two_connections_never_claim_the_same_request(queue: Queue, path: Path) -> None:
    expected = {queue.make().id for _ in range(200)}
    claimed: list[str] = []

    def drain() -> None:
        other = Queue(path)
        while ids := other.claimed(7):
            claimed.extend(ids)
        other.close()

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(expected)
    assert set(claimed) == expected


def newest(*states: R) -> Executable:
    return statements.newest_requests(frozenset(states), frozenset())


@pytest.mark.parametrize(
    ("statement", "parameters", "index", "is_sorted_by_it"),
    [
        (statements.CLAIM, {"now": 1.5, "of_schedule": "SHORT", "up_to": 5}, "claim", True),
        (statements.FIRST_PENDING, {"of_schedule": "SHORT", "up_to": 5}, "claim", True),
        (newest(R.PENDING, R.RUNNING), {"up_to": 5}, "unfinished", False),
        (statements.RUNNING_REQUESTS, {}, "unfinished", False),
        (newest(R.FAILED), {"up_to": 5}, "failed", True),
    ],
    ids=["claim", "first pending", "active", "running", "failed"],
)
def test_what_is_read_often_has_an_index(
    queue: Queue,
    statement: Executable,
    parameters: dict[str, Any],
    index: str,
    is_sorted_by_it: bool,
) -> None:
    """As SQLite plans it, with every parameter bound as in real use."""
    compiled: Any = statement.compile(queue._engine)  # type: ignore[attr-defined]
    values = compiled.construct_params(parameters)
    bound = tuple(values[name] for name in compiled.positiontup)
    with queue.transaction() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}", bound).all()
    plan = " ".join(str(row) for row in rows)
    assert f"ix_requests_{index}" in plan
    assert not (is_sorted_by_it and "TEMP B-TREE" in plan)


def test_progress_becomes_an_event_unless_too_late_or_of_an_unknown_request(queue: Queue) -> None:
    request = queue.make(R.RUNNING, environment="trial")
    [event] = queue.record(progress=[(request.id, {"phase": "starting"}, 201.5)])
    assert (event.kind, event.at, event.data) == ("request.progress", 201.5, {"phase": "starting"})
    assert (event.request_id, event.environment) == (request.id, "trial")
    request = queue.make(R.SUCCEEDED)
    assert queue.record(progress=[(request.id, {}, 201.5), ("0" * 16, {}, 201.5)]) == ()
    assert queue.end("0" * 16) == ()


def test_an_outcome_is_written_with_error_and_peak_and_a_second_dropped(queue: Queue) -> None:
    request = queue.make(R.RUNNING)
    error = RequestError(
        ErrorKind.OOM_KILLED, "out of memory", "give it more", {"pid": 7}, ("last", "words")
    )
    assert data_of(queue.end(request.id, R.FAILED, error=error, peak_bytes=2**40)) == [
        {"state": "FAILED"}
    ]
    found = queue.get(request.id)
    assert (found.state, found.finished_at) == (R.FAILED, 300.5)
    assert (found.error, found.peak_bytes) == (error, 2**40)
    request = queue.make(R.RUNNING)
    first = Outcome(request.id, R.SUCCEEDED, 300.5, result="first")
    second = Outcome(request.id, R.CANCELLED, 301.5)
    assert data_of(queue.record(outcomes=[first, second])) == [{"state": "SUCCEEDED"}]
    assert queue.record(outcomes=[second]) == ()
    assert queue.get(request.id).result == "first"


def test_an_outcome_without_a_final_state_is_refused_with_its_whole_batch(queue: Queue) -> None:
    good, bad = queue.make(R.RUNNING), queue.make(R.RUNNING)
    batch = [Outcome(good.id, R.SUCCEEDED, 300.5), Outcome(bad.id, R.PENDING, 300.5)]
    with pytest.raises(InvalidTransition, match=bad.id):
        queue.record(outcomes=batch)
    assert queue.get(good.id).state is R.RUNNING


def test_a_batch_of_any_size_returns_its_events_in_order(queue: Queue) -> None:
    request = queue.make(R.RUNNING)
    events = queue.record(
        started=[(request.id, "short-1", 1, 1.5, 201.5)],
        progress=[(request.id, {"n": n}, 202.5) for n in range(3)],
        outcomes=[Outcome(request.id, R.SUCCEEDED, 203.5)],
    )
    assert data_of(events) == [{"n": 0}, {"n": 1}, {"n": 2}, {"state": "SUCCEEDED"}]
    assert [event.seq for event in events] == list(range(events[0].seq, events[0].seq + 4))
    ids = [queue.make().id for _ in range(1100)]
    queue.claim(len(ids))
    outcomes = [Outcome(id_, R.SUCCEEDED, 300.5) for id_ in ids]
    assert len(queue.record(outcomes=outcomes)) == len(ids)


def test_release_or_retry_cancels_a_request_that_is_to_be_cancelled(queue: Queue) -> None:
    request = queue.make(R.RUNNING)
    queue.cancel(request)
    assert data_of(queue.release(request)) == [{"state": "CANCELLED"}]
    assert queue.get(request.id).finished_at == 400.5
    request = queue.make(R.RUNNING)
    queue.cancel(request)
    again = [Retry(request.id, 300.5, 512, "again")]
    queue.record(retries=again)
    assert queue.get(request.id).state is R.CANCELLED
    assert queue.record(retries=again) == ()


def test_memory_estimates_are_listed_latest_first_and_a_new_one_replaces_the_old(
    queue: Queue,
) -> None:
    early = MemoryEstimate("launch", "a", (PeakSample(300.5, 1), PeakSample(300.5, 2)), 300.5)
    late = MemoryEstimate("launch", "b", (PeakSample(400.5, 3),), 400.5)
    queue.record(learned=[early, late])
    assert queue.read(queries.memory_estimates(10)) == [late, early]
    assert queue.read(queries.memory_estimates(1)) == [late]
    newer = MemoryEstimate("launch", "a", (PeakSample(500.5, 7, killed=True),), 500.5)
    queue.record(learned=[newer])
    assert queue.read(queries.memory_estimates(10)) == [newer, late]


def test_a_long_wait_outweighs_a_higher_priority(queue: Queue) -> None:
    later = 100.5 + 2 * PRIORITY_STEP_SECONDS
    old = queue.make(now=100.5)
    urgent, more_urgent = (queue.make(now=later, priority=priority) for priority in (1, 3))
    assert queue.claimed(3) == [more_urgent.id, old.id, urgent.id]


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0], ids=["a day back", "a day ahead"])
def test_a_step_of_the_wall_clock_changes_no_place_in_the_queue(queue: Queue, step: float) -> None:
    clock = QueueClock(latest_arrival=1_795_000_000.5)
    first = queue.make(now=100.5, arrival=clock.now())
    later = queue.make(now=100.5 + step, arrival=clock.now())
    urgent = queue.make(now=100.5 + step, arrival=clock.now(), priority=1)
    assert queue.claimed(3, now=100.5 + step) == [urgent.id, first.id, later.id]


def test_the_queue_clock_goes_on_from_the_youngest_that_is_unfinished(queue: Queue) -> None:
    assert queue.read(queries.LATEST_ARRIVAL) == 0.0
    queue.make(arrival=500.5, priority=2)
    queue.make(R.RUNNING, arrival=700.5)
    queue.make(R.SUCCEEDED, arrival=900.5)
    latest = queue.read(queries.LATEST_ARRIVAL)
    assert latest == 700.5
    assert QueueClock(latest).now() >= latest


def test_claim_chosen_skips_requests_that_were_cancelled_meanwhile(queue: Queue) -> None:
    first, second, third = (queue.make() for _ in range(3))
    queue.cancel(first)
    claim = queue.write(dispatching.claim_chosen, [third, first], 200.5)
    assert [(r.id, r.state, r.attempts) for r in claim.requests] == [(third.id, R.RUNNING, 1)]
    assert data_of(claim.events) == [{"state": "RUNNING"}]
    assert pending(queue) == [second.id]


def test_a_retry_returns_to_the_queue_with_its_new_memory(queue: Queue) -> None:
    request = queue.make(R.RUNNING, retry_oom=True)
    retry = Retry(request.id, 300.5, 512, "killed at 256 MB; runs again with 512 MB")
    progress, state = queue.record(retries=[retry])
    data = {"phase": "retrying", "message": retry.message, "memory_bytes": 512, "error": None}
    assert (progress.data, state.data) == (data, {"state": "PENDING"})
    found = queue.get(request.id)
    assert (found.state, found.attempts, found.memory_bytes) == (R.PENDING, 1, 512)
    assert (found.retry_oom, found.worker, found.started_at) == (True, None, None)
    assert queue.claim().requests[0].attempts == 2


# What becomes of requests whose daemon was lost.


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


def test_what_is_not_idempotent_fails_as_lost_and_recovery_touches_it_once(queue: Queue) -> None:
    request = queue.make(R.RUNNING, operation="down")
    [failed] = recover(queue)
    assert queue.get(request.id) == failed
    assert failed.error is not None
    assert (failed.error.kind, failed.finished_at) == (ErrorKind.WORKER_LOST, 400.5)
    for state in RequestState:
        queue.make(state)
    assert [request.state for request in recover(queue)] == [R.FAILED]
    assert recover(queue) == []
