# SPDX-License-Identifier: Apache-2.0
"""Claiming, recording and releasing: functions over a connection, in batches.

What the supervisor reports may come late: about a request that was recovered meanwhile, or twice.
An outcome's UPDATE writes only where it still applies, and returns the request as it stands then;
for the rest a batch first reads how its requests stand (`_standing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ..connections.sqlite import MAX_PARAMETERS
from ..errors import InvalidTransition
from ..records import Event, Expectation, Json, Outcome, Request, Retry
from ..results import Claim, NotRunning, OutcomeResult, Recorded
from ..sql import prepared, statements
from ..sql.rows import error_to_json, expectation_values, rank_of, request_of, to_json
from ..states import RequestState, Schedule
from .journal import REQUEST_PROGRESS, Journal

StartedRow = tuple[str, str, int, float, float]  # id, worker, pid, pid_started_at, at
ProgressRow = tuple[str, Json, float]  # id, data, at


@dataclass(slots=True)
class _Standing:
    """How a request stands before, and while, a batch is recorded."""

    id: str
    seq: int
    environment: str | None
    state: RequestState
    cancel_requested: bool


def claim(connection: Connection, schedule: Schedule, limit: int, now: float) -> Claim:
    """Move the first `limit` pending requests to RUNNING."""
    parameters = {"of_schedule": schedule.value, "up_to": limit, "now": now}
    return _claimed(connection, prepared.rows(connection, statements.CLAIM, parameters), now)


def claim_chosen(connection: Connection, seqs: Sequence[int], now: float) -> Claim:
    """Move these, as far as they are still pending, to RUNNING; at most `MAX_PARAMETERS`."""
    parameters = {"seqs": list(seqs), "now": now}
    return _claimed(connection, connection.execute(statements.CLAIM_CHOSEN, parameters).all(), now)


def _claimed(connection: Connection, rows: Sequence[Any], now: float) -> Claim:
    # RETURNING has no order of its own.
    requests = sorted((request_of(row) for row in rows), key=_place_in_queue)
    journal = Journal()
    for request in requests:
        journal.moved(request, RequestState.PENDING, RequestState.RUNNING, now)
    return Claim(tuple(requests), journal.write(connection))


def _place_in_queue(request: Request) -> tuple[float, int]:
    return rank_of(request.created_at, request.priority), request.seq


def record(
    connection: Connection,
    started: Sequence[StartedRow],
    progress: Sequence[ProgressRow],
    outcomes: Sequence[Outcome],
    retries: Sequence[Retry] = (),
) -> tuple[tuple[Event, ...], list[OutcomeResult]]:
    """Write what was reported, in the order in which it happens to one request."""
    standing = _standing(connection, {*(p[0] for p in progress), *(r.request_id for r in retries)})
    begun = {row[0]: _began_values(row) for row in started}
    journal = Journal()
    _note_progress(journal, progress, standing)
    _record_retries(connection, journal, retries, standing)
    applied = _record_outcomes(connection, journal, outcomes, begun)
    over = {outcome.request_id for outcome in outcomes}
    still = [{"of_id": i, **values} for i, values in begun.items() if i not in over]
    prepared.each(connection, statements.STARTED, still)
    events = journal.write(connection)
    return events, _results(connection, outcomes, applied, events)


def learn(connection: Connection, expectations: Sequence[Expectation]) -> None:
    """Write what peaks have taught, in the place of what they had taught before."""
    if not expectations:
        return
    keys = [{"of_operation": e.operation, "of_source": e.source} for e in expectations]
    prepared.each(connection, statements.DELETE_EXPECTATION, keys)
    values = [expectation_values(expectation) for expectation in expectations]
    prepared.each(connection, statements.INSERT_EXPECTATION, values)


def release(connection: Connection, ids: Sequence[str], now: float) -> tuple[Event, ...]:
    """Give back what was claimed and never began. What was cancelled meanwhile ends here."""
    standing = _standing(connection, ids)
    running = {i: s for i, s in standing.items() if s.state is RequestState.RUNNING}
    back = [i for i, s in running.items() if not s.cancel_requested]
    cancelled = [
        Outcome(i, RequestState.CANCELLED, now) for i, s in running.items() if s.cancel_requested
    ]
    journal = Journal()
    for request_id in back:
        journal.moved(running[request_id], RequestState.RUNNING, RequestState.PENDING, now)
    prepared.each(connection, statements.RELEASE, [{"of_id": i} for i in back])
    _record_outcomes(connection, journal, cancelled)
    return journal.write(connection)


def finish_values(outcome: Outcome, began: Json | None = None) -> dict[str, Any]:
    """What `FINISH` is given; with what is only now known of its beginning."""
    return {
        **(began or _BEGAN_UNTOLD),
        "of_id": outcome.request_id,
        "to_state": outcome.state.value,
        "to_finished_at": outcome.finished_at,
        "to_result": None if outcome.result is None else to_json(outcome.result),
        "to_error": error_to_json(outcome.error),
        "to_peak_bytes": outcome.peak_bytes,
    }


def _standing(connection: Connection, ids: Iterable[str]) -> dict[str, _Standing]:
    wanted = list(ids)
    found: dict[str, _Standing] = {}
    for start in range(0, len(wanted), MAX_PARAMETERS):
        part = wanted[start : start + MAX_PARAMETERS]
        rows = connection.execute(statements.STANDING, {"ids": part})
        for id_, seq, environment, state, asked in rows:
            found[id_] = _Standing(id_, seq, environment, RequestState(state), asked is not None)
    return found


def _began_values(row: StartedRow) -> Json:
    _, worker, pid, pid_started_at, at = row
    return {
        "to_worker": worker,
        "to_worker_pid": pid,
        "to_worker_started_at": pid_started_at,
        "to_started_at": at,
    }


_BEGAN_UNTOLD = {
    "to_worker": None,
    "to_worker_pid": None,
    "to_worker_started_at": None,
    "to_started_at": None,
}


def _note_progress(
    journal: Journal, progress: Sequence[ProgressRow], standing: dict[str, _Standing]
) -> None:
    for request_id, data, at in progress:
        known = standing.get(request_id)
        if known is not None and known.state is RequestState.RUNNING:
            journal.noted(
                REQUEST_PROGRESS,
                at,
                data,
                request=known,
                environment=known.environment,
            )


def _record_retries(
    connection: Connection,
    journal: Journal,
    retries: Sequence[Retry],
    standing: dict[str, _Standing],
) -> None:
    """Back to the queue; what somebody wants cancelled ends here instead."""
    for retry in retries:
        known = standing.get(retry.request_id)
        if known is None or known.state is not RequestState.RUNNING:
            continue
        if known.cancel_requested:
            cancelled = Outcome(known.id, RequestState.CANCELLED, retry.at)
            _record_outcomes(connection, journal, [cancelled])
            continue
        journal.noted(
            REQUEST_PROGRESS,
            retry.at,
            {"phase": "retrying", "message": retry.message},
            request=known,
            environment=known.environment,
        )
        journal.moved(known, known.state, RequestState.PENDING, retry.at)
        known.state = RequestState.PENDING
        values = {"of_id": known.id, "to_memory_bytes": retry.memory_bytes}
        connection.execute(statements.RETRY, values)


def _record_outcomes(
    connection: Connection,
    journal: Journal,
    outcomes: Sequence[Outcome],
    begun: Mapping[str, Json] | None = None,
) -> list[bool]:
    """Write each outcome whose request still runs; which of them were."""
    applied = []
    for outcome in outcomes:
        _must_end(outcome)
        values = finish_values(outcome, (begun or {}).get(outcome.request_id))
        row = prepared.row(connection, statements.FINISH, values)
        applied.append(row is not None)
        if row is not None:
            request = request_of(row)
            journal.moved(request, RequestState.RUNNING, outcome.state, outcome.finished_at)
    return applied


def _must_end(outcome: Outcome) -> None:
    if not outcome.state.is_final:
        subject = f"request {outcome.request_id}"
        raise InvalidTransition(subject, RequestState.RUNNING.value, f"{outcome.state.value} (end)")


def _results(
    connection: Connection,
    outcomes: Sequence[Outcome],
    applied: Sequence[bool],
    events: Sequence[Event],
) -> list[OutcomeResult]:
    # The outcomes' events are the last ones written, in the outcomes' order.
    ends = iter(events[len(events) - sum(applied) :])
    late = [o.request_id for o, applies in zip(outcomes, applied, strict=True) if not applies]
    standing = _standing(connection, late)
    results: list[OutcomeResult] = []
    for outcome, applies in zip(outcomes, applied, strict=True):
        if applies:
            results.append(Recorded(outcome.request_id, next(ends)))
        else:
            known = standing.get(outcome.request_id)
            results.append(NotRunning(outcome.request_id, known.state if known else None))
    return results
