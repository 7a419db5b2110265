# SPDX-License-Identifier: Apache-2.0
"""Claiming, recording and releasing, through the dispatcher's store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Executable

from openenvd.requests_db.connections.sqlite import WriteConnection
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
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.states import ErrorKind, InvalidTransition, RequestState, Schedule

Make = Callable[..., Request]


def read(writer: WriteConnection, request_id: str) -> Request:
    with writer.transaction() as connection:
        found = queries.get(request_id).run(connection)
    assert isinstance(found, Request)
    return found


def plan_of(writer: WriteConnection, statement: Executable, **parameters: Any) -> str:
    """What SQLite says it does, with every parameter bound as in real use."""
    compiled: Any = statement.compile(writer._engine)  # type: ignore[attr-defined]
    values = compiled.construct_params(parameters)
    bound = tuple(values[name] for name in compiled.positiontup)
    with writer.transaction() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}", bound).all()
    return " ".join(str(row) for row in rows)


def test_claim_takes_the_oldest_first(make_request: Make, dispatch: WriteConnection) -> None:
    ids = [make_request().id for _ in range(5)]
    assert [
        r.id for r in dispatch.write(dispatching.claim, Schedule.SHORT, 3, 200.5).requests
    ] == ids[:3]
    assert [
        r.id for r in dispatch.write(dispatching.claim, Schedule.SHORT, 3, 200.5).requests
    ] == ids[3:]


def test_claim_prefers_a_higher_priority(make_request: Make, dispatch: WriteConnection) -> None:
    low, high, lowest = (make_request(priority=p).id for p in (0, 5, -5))
    claim = dispatch.write(dispatching.claim, Schedule.SHORT, 3, 200.5)
    assert [r.id for r in claim.requests] == [high, low, lowest]


def test_claim_takes_its_own_schedule_alone(make_request: Make, dispatch: WriteConnection) -> None:
    make_request(schedule=Schedule.LONG)
    assert dispatch.write(dispatching.claim, Schedule.SHORT, 3, 200.5).requests == ()
    assert len(dispatch.read(queries.first_pending(Schedule.LONG, 10))) == 1


def test_a_claimed_request_runs_and_its_attempt_counts(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(payload={"a": 1})
    claim = dispatch.write(dispatching.claim, Schedule.SHORT, 3, 200.5)
    assert claim.requests == (read(writer, request.id),)
    [claimed] = claim.requests
    assert (claimed.state, claimed.attempts, claimed.started_at) == (
        RequestState.RUNNING,
        1,
        200.5,
    )
    assert [event.data for event in claim.events] == [{"state": "RUNNING"}]


def test_two_connections_never_claim_the_same_request(make_request: Make, path: Path) -> None:
    expected = {make_request().id for _ in range(200)}
    claimed: list[str] = []

    def drain() -> None:
        store = WriteConnection(path)
        while requests := store.write(dispatching.claim, Schedule.SHORT, 7, 200.5).requests:
            claimed.extend(request.id for request in requests)
        store.close()

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(expected)
    assert set(claimed) == expected


def test_the_claim_reads_the_index_of_pending_requests(writer: WriteConnection) -> None:
    plan = plan_of(writer, statements.CLAIM, now=1.5, of_schedule="SHORT", up_to=5)
    assert "ix_requests_claim" in plan
    assert "TEMP B-TREE" not in plan


def test_a_list_of_active_requests_reads_the_index_of_unfinished_ones(
    writer: WriteConnection,
) -> None:
    active = frozenset({RequestState.PENDING, RequestState.RUNNING})
    query = statements.newest_requests(active, frozenset())
    assert "ix_requests_unfinished" in plan_of(writer, query, up_to=5)
    assert "ix_requests_unfinished" in plan_of(writer, statements.RUNNING_REQUESTS)


def test_a_list_of_failed_requests_reads_their_index(writer: WriteConnection) -> None:
    query = statements.newest_requests(frozenset({RequestState.FAILED}), frozenset())
    plan = plan_of(writer, query, up_to=5)
    assert "ix_requests_failed" in plan
    assert "TEMP B-TREE" not in plan


def test_progress_of_a_running_request_becomes_an_event(
    make_request: Make, dispatch: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING, environment="trial")
    [event] = dispatch.write(
        dispatching.record, progress=[(request.id, {"phase": "starting"}, 201.5)]
    )
    assert (event.kind, event.at, event.data) == ("request.progress", 201.5, {"phase": "starting"})
    assert (event.request_id, event.environment) == (request.id, "trial")


def test_progress_of_an_ended_request_is_dropped(
    make_request: Make, dispatch: WriteConnection
) -> None:
    request = make_request(RequestState.SUCCEEDED)
    assert (
        dispatch.write(
            dispatching.record, progress=[(request.id, {}, 201.5), ("0" * 16, {}, 201.5)]
        )
        == ()
    )


def test_an_outcome_is_written_with_its_error_and_peak(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING)
    error = RequestError(
        ErrorKind.OOM_KILLED, "out of memory", "give it more", {"pid": 7}, ("last", "words")
    )
    outcome = Outcome(request.id, RequestState.FAILED, 300.5, error=error, peak_bytes=2**40)
    [event] = dispatch.write(dispatching.record, outcomes=[outcome])
    assert event.data == {"state": "FAILED"}
    found = read(writer, request.id)
    assert (found.state, found.finished_at) == (RequestState.FAILED, 300.5)
    assert (found.error, found.peak_bytes) == (error, 2**40)


def test_a_second_outcome_is_dropped(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING)
    first = Outcome(request.id, RequestState.SUCCEEDED, 300.5, result="first")
    second = Outcome(request.id, RequestState.CANCELLED, 301.5)
    [written] = dispatch.write(dispatching.record, outcomes=[first, second])
    assert written.data == {"state": "SUCCEEDED"}
    assert dispatch.write(dispatching.record, outcomes=[second]) == ()
    assert read(writer, request.id).result == "first"


def test_an_outcome_of_an_unknown_request_is_dropped(dispatch: WriteConnection) -> None:
    outcome = Outcome("0" * 16, RequestState.SUCCEEDED, 300.5)
    assert dispatch.write(dispatching.record, outcomes=[outcome]) == ()


def test_an_outcome_without_a_final_state_is_refused_with_its_whole_batch(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    good, bad = make_request(RequestState.RUNNING), make_request(RequestState.RUNNING)
    batch = [
        Outcome(good.id, RequestState.SUCCEEDED, 300.5),
        Outcome(bad.id, RequestState.PENDING, 300.5),
    ]
    with pytest.raises(InvalidTransition, match=bad.id):
        dispatch.write(dispatching.record, outcomes=batch)
    assert read(writer, good.id).state is RequestState.RUNNING


def test_a_batch_returns_its_events_in_order(make_request: Make, dispatch: WriteConnection) -> None:
    request = make_request(RequestState.RUNNING)
    events = dispatch.write(
        dispatching.record,
        started=[(request.id, "short-1", 1, 1.5, 201.5)],
        progress=[(request.id, {"n": n}, 202.5) for n in range(3)],
        outcomes=[Outcome(request.id, RequestState.SUCCEEDED, 203.5)],
    )
    assert [event.data for event in events] == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
        {"state": "SUCCEEDED"},
    ]
    assert [event.seq for event in events] == list(range(events[0].seq, events[0].seq + 4))


def test_a_batch_may_be_larger_than_one_statement_takes_parameters(
    make_request: Make, dispatch: WriteConnection
) -> None:
    ids = [make_request().id for _ in range(1100)]
    dispatch.write(dispatching.claim, Schedule.SHORT, len(ids), 200.5)
    outcomes = [Outcome(id_, RequestState.SUCCEEDED, 300.5) for id_ in ids]
    assert len(dispatch.write(dispatching.record, outcomes=outcomes)) == len(ids)


def test_a_released_request_keeps_its_place_in_the_queue(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    first, second = make_request(), make_request()
    dispatch.write(dispatching.claim, Schedule.SHORT, 1, 200.5)
    [event] = dispatch.write(dispatching.release, [first.id], 201.5)
    assert event.data == {"state": "PENDING"}
    assert read(writer, first.id) == first
    claim = dispatch.write(dispatching.claim, Schedule.SHORT, 2, 202.5)
    assert [request.id for request in claim.requests] == [first.id, second.id]


def test_release_cancels_a_request_that_is_to_be_cancelled(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING)
    with writer.transaction() as connection:
        submitting.cancel(connection, request.id, 201.5)
    [event] = dispatch.write(dispatching.release, [request.id], 202.5)
    assert event.data == {"state": "CANCELLED"}
    assert read(writer, request.id).finished_at == 202.5


def estimate(source: str, *peaks: int, at: float = 300.5) -> MemoryEstimate:
    return MemoryEstimate("launch", source, tuple(PeakSample(at, peak) for peak in peaks), at)


def test_memory_estimates_are_listed_latest_first(dispatch: WriteConnection) -> None:
    early, late = estimate("a", 1, 2), estimate("b", 3, at=400.5)
    dispatch.write(dispatching.record, learned=[early, late])
    assert dispatch.read(queries.memory_estimates(10)) == [late, early]
    assert dispatch.read(queries.memory_estimates(1)) == [late]


def test_a_new_memory_estimate_replaces_the_old_one(dispatch: WriteConnection) -> None:
    dispatch.write(dispatching.record, learned=[estimate("a", 1)])
    newer = MemoryEstimate("launch", "a", (PeakSample(400.5, 7, killed=True),), 400.5)
    dispatch.write(dispatching.record, learned=[newer])
    assert dispatch.read(queries.memory_estimates(10)) == [newer]


def test_a_long_wait_outweighs_a_higher_priority(
    make_request: Make, dispatch: WriteConnection
) -> None:
    old = make_request(now=100.5)
    urgent = make_request(now=100.5 + 2 * PRIORITY_STEP_SECONDS, priority=1)
    more_urgent = make_request(now=100.5 + 2 * PRIORITY_STEP_SECONDS, priority=3)
    claim = dispatch.write(dispatching.claim, Schedule.SHORT, 3, 300.5)
    assert claim.requests[0].id == more_urgent.id
    assert [r.id for r in claim.requests[1:]] == [old.id, urgent.id]


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0], ids=["a day back", "a day ahead"])
def test_a_step_of_the_wall_clock_changes_no_place_in_the_queue(
    make_request: Make, dispatch: WriteConnection, step: float
) -> None:
    clock = QueueClock(latest_arrival=1_795_000_000.5)
    first = make_request(now=100.5, arrival=clock.now())
    later = make_request(now=100.5 + step, arrival=clock.now())
    urgent = make_request(now=100.5 + step, arrival=clock.now(), priority=1)
    claim = dispatch.write(dispatching.claim, Schedule.SHORT, 3, 100.5 + step)
    assert [request.id for request in claim.requests] == [urgent.id, first.id, later.id]


def test_the_queue_clock_goes_on_from_the_youngest_that_is_unfinished(
    make_request: Make, dispatch: WriteConnection
) -> None:
    assert dispatch.read(queries.LATEST_ARRIVAL) == 0.0
    make_request(arrival=500.5, priority=2)
    make_request(RequestState.RUNNING, arrival=700.5)
    make_request(RequestState.SUCCEEDED, arrival=900.5)
    latest = dispatch.read(queries.LATEST_ARRIVAL)
    assert latest == 700.5
    assert QueueClock(latest).now() >= latest


def test_first_pending_claims_nothing(make_request: Make, dispatch: WriteConnection) -> None:
    ids = [make_request().id for _ in range(3)]
    assert [r.id for r in dispatch.read(queries.first_pending(Schedule.SHORT, 2))] == ids[:2]
    assert len(dispatch.read(queries.first_pending(Schedule.SHORT, 10))) == 3


def test_claim_chosen_skips_requests_that_were_cancelled_meanwhile(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    first, _, third = (make_request() for _ in range(3))
    with writer.transaction() as connection:
        submitting.cancel(connection, first.id, 150.5)
    claim = dispatch.write(dispatching.claim_chosen, [third, first], 200.5)
    assert [(r.id, r.state, r.attempts) for r in claim.requests] == [
        (third.id, RequestState.RUNNING, 1)
    ]
    assert [event.data for event in claim.events] == [{"state": "RUNNING"}]
    assert len(dispatch.read(queries.first_pending(Schedule.SHORT, 10))) == 1


def test_first_pending_reads_the_index_of_pending_requests(writer: WriteConnection) -> None:
    plan = plan_of(writer, statements.FIRST_PENDING, of_schedule="SHORT", up_to=5)
    assert "ix_requests_claim" in plan
    assert "TEMP B-TREE" not in plan


def test_a_retry_returns_to_the_queue_with_its_new_memory(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING, retry_oom=True)
    retry = Retry(request.id, 300.5, 512, "killed at 256 MB; runs again with 512 MB")
    progress, state = dispatch.write(dispatching.record, retries=[retry])
    assert progress.data == {
        "phase": "retrying",
        "message": retry.message,
        "memory_bytes": 512,
        "error": None,
    }
    assert state.data == {"state": "PENDING"}
    found = read(writer, request.id)
    assert (found.state, found.attempts, found.memory_bytes) == (RequestState.PENDING, 1, 512)
    assert (found.retry_oom, found.worker, found.started_at) == (True, None, None)
    assert dispatch.write(dispatching.claim, Schedule.SHORT, 1, 301.5).requests[0].attempts == 2


def test_a_retry_of_a_request_that_is_to_be_cancelled_cancels_it(
    make_request: Make, dispatch: WriteConnection, writer: WriteConnection
) -> None:
    request = make_request(RequestState.RUNNING)
    with writer.transaction() as connection:
        submitting.cancel(connection, request.id, 250.5)
    dispatch.write(dispatching.record, retries=[Retry(request.id, 300.5, 512, "again")])
    assert read(writer, request.id).state is RequestState.CANCELLED
    assert (
        dispatch.write(dispatching.record, retries=[Retry(request.id, 301.5, 512, "again")]) == ()
    )
