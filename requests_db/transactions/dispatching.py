# SPDX-License-Identifier: Apache-2.0
"""Claiming, recording, releasing and recovering: functions over a connection, in batches.

The executor may report late: about a request that was recovered meanwhile, or twice. An outcome's
UPDATE writes only where it still applies, and returns the request as it is then; for the rest a
batch first reads the current state of its requests (`_current`).

`recover` settles the requests that a lost daemon left RUNNING: once, before a daemon claims. The
caller first ends the workers that may still be alive (`queries.running` names them).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection

from ...schema.states import ErrorKind, InvalidTransition, RequestState, Schedule
from ...system.text.json_lines import Json
from ..records import RETRYING, Claim, Event, MemoryEstimate, Outcome, Request, RequestError, Retry
from ..sql import queries, statements
from ..sql.rows import ESTIMATES, REQUESTS, error_to_json, to_json
from .journal import REQUEST_PROGRESS, CurrentRequest, Journal

StartedRow = tuple[str, str, int, float, float]  # id, worker, pid, pid_started_at, at
ProgressRow = tuple[str, Json, float]  # id, data, at

_WORKER_FIELDS = ("to_worker", "to_worker_pid", "to_worker_started_at", "to_started_at")
_WORKER_UNKNOWN = dict.fromkeys(_WORKER_FIELDS)


def claim(connection: Connection, schedule: Schedule, limit: int, now: float) -> Claim:
    """Move up to `limit` pending requests to RUNNING, by their place in the queue.

    Their attempt is counted; no other claim, in this process or another, gets the same one.
    """
    parameters = {"of_schedule": schedule.value, "up_to": limit, "now": now}
    return _claimed(connection, queries.rows(connection, statements.CLAIM, parameters), now)


def claim_chosen(connection: Connection, chosen: Sequence[Request], now: float) -> Claim:
    """Move the chosen requests that are still pending to RUNNING."""
    parameters = {"seqs": [request.seq for request in chosen], "now": now}
    return _claimed(connection, connection.execute(statements.CLAIM_CHOSEN, parameters).all(), now)


def _claimed(connection: Connection, rows: Sequence[Any], now: float) -> Claim:
    # RETURNING has no order of its own.
    requests = sorted(REQUESTS.read_all(rows), key=attrgetter("rank", "seq"))
    journal = Journal()
    for request in requests:
        journal.moved(request, RequestState.PENDING, RequestState.RUNNING, now)
    return Claim(tuple(requests), journal.write(connection))


def record(
    connection: Connection,
    *,
    started: Sequence[StartedRow] = (),
    progress: Sequence[ProgressRow] = (),
    outcomes: Sequence[Outcome] = (),
    retries: Sequence[Retry] = (),
    learned: Sequence[MemoryEstimate] = (),
) -> tuple[Event, ...]:
    """Write what was reported, in the order in which it happens to one request.

    What no longer applies (a second outcome, one of an unknown request) is dropped. `started` says
    which worker took which request, `progress` what operations reported while they ran; `learned`
    are memory estimates, in the place of those known before.

    Raises `InvalidTransition`: an outcome's state is not final.
    """
    current = _current(connection, {*(p[0] for p in progress), *(r.request_id for r in retries)})
    workers = {row[0]: dict(zip(_WORKER_FIELDS, row[1:], strict=True)) for row in started}
    journal = Journal()
    for request_id, data, at in progress:
        known = current.get(request_id)
        if known is not None and known.state is RequestState.RUNNING:
            journal.noted(REQUEST_PROGRESS, at, data, known)
    _record_retries(connection, journal, retries, current)
    _record_outcomes(connection, journal, outcomes, workers)
    ended = {outcome.request_id for outcome in outcomes}
    still = [{"of_id": i, **values} for i, values in workers.items() if i not in ended]
    queries.each(connection, statements.STARTED, still)
    queries.each(connection, statements.REPLACE_ESTIMATE, [ESTIMATES.values(e) for e in learned])
    return journal.write(connection)


def release(connection: Connection, ids: Sequence[str], now: float) -> tuple[Event, ...]:
    """Give back requests that never started, or cancel them if asked to; no attempt counts."""
    current = _current(connection, ids)
    running = {i: c for i, c in current.items() if c.state is RequestState.RUNNING}
    back = [i for i, c in running.items() if not c.cancel_requested]
    cancelled = [
        Outcome(i, RequestState.CANCELLED, now) for i, c in running.items() if c.cancel_requested
    ]
    journal = Journal()
    for request_id in back:
        journal.moved(running[request_id], RequestState.RUNNING, RequestState.PENDING, now)
    queries.each(connection, statements.RELEASE, [{"of_id": i} for i in back])
    _record_outcomes(connection, journal, cancelled, {})
    return journal.write(connection)


def finish_values(outcome: Outcome, worker: Json | None = None) -> dict[str, Any]:
    """The parameters of `FINISH`; with the worker, if it is only now known."""
    return {
        **(worker or _WORKER_UNKNOWN),
        "of_id": outcome.request_id,
        "to_state": outcome.state.value,
        "to_finished_at": outcome.finished_at,
        "to_result": None if outcome.result is None else to_json(outcome.result),
        "to_error": error_to_json(outcome.error),
        "to_peak_bytes": outcome.peak_bytes,
    }


def _current(connection: Connection, ids: Collection[str]) -> dict[str, CurrentRequest]:
    if not ids:
        return {}
    # As many as run at most: an SQLite that knows RETURNING takes 32,766 parameters.
    rows = connection.execute(statements.CURRENT, {"ids": list(ids)})
    return {
        id_: CurrentRequest(id_, seq, environment, RequestState(state), asked is not None)
        for id_, seq, environment, state, asked in rows
    }


def _record_retries(
    connection: Connection,
    journal: Journal,
    retries: Sequence[Retry],
    current: dict[str, CurrentRequest],
) -> None:
    """Put requests back into the queue, or cancel them if that was requested."""
    for retry in retries:
        known = current.get(retry.request_id)
        if known is None or known.state is not RequestState.RUNNING:
            continue
        if known.cancel_requested:
            cancelled = Outcome(known.id, RequestState.CANCELLED, retry.at)
            _record_outcomes(connection, journal, [cancelled], {})
            continue
        data = {
            "phase": RETRYING,
            "message": retry.message,
            "memory_bytes": retry.memory_bytes,
            "error": retry.error,
        }
        journal.noted(REQUEST_PROGRESS, retry.at, data, known)
        journal.moved(known, known.state, RequestState.PENDING, retry.at)
        known.state = RequestState.PENDING
        values = {"of_id": known.id, "to_memory_bytes": retry.memory_bytes}
        connection.execute(statements.RETRY, values)


def _record_outcomes(
    connection: Connection,
    journal: Journal,
    outcomes: Sequence[Outcome],
    workers: Mapping[str, Json],
) -> None:
    """Write each outcome whose request still runs; drop the others."""
    for outcome in outcomes:
        if not outcome.state.is_final:
            subject, state = f"request {outcome.request_id}", f"{outcome.state.value} (end)"
            raise InvalidTransition(subject, RequestState.RUNNING.value, state)
        values = finish_values(outcome, workers.get(outcome.request_id))
        row = queries.row(connection, statements.FINISH, values)
        if row is not None:
            request = REQUESTS.read(row)
            journal.moved(request, RequestState.RUNNING, outcome.state, outcome.finished_at)


# A killed daemon is no failure of its requests, but one that ends every daemon must not run again.
MAX_LOST_DAEMONS = 10


def next_state(request: Request, idempotent: Set[str]) -> RequestState:
    """The state of a request whose daemon was lost: PENDING again, FAILED or CANCELLED."""
    if request.cancel_requested_at is not None:
        return RequestState.CANCELLED
    again = request.operation in idempotent and request.lost_daemons < MAX_LOST_DAEMONS
    return RequestState.PENDING if again else RequestState.FAILED


def recover(connection: Connection, now: float, *, idempotent: Set[str]) -> list[Request]:
    """Move each running request to its next state, and return it; `idempotent` ones run again."""
    recovered = []
    journal = Journal()
    for request in queries.RUNNING.run(connection):
        state = next_state(request, idempotent)
        if state is RequestState.PENDING:
            connection.execute(statements.REQUEUE, {"of_id": request.id})
        else:
            error = _lost(request) if state is RequestState.FAILED else None
            outcome = Outcome(request.id, state, now, error=error)
            queries.rows(connection, statements.FINISH, finish_values(outcome))
        after = queries.request(request.id).run(connection) or request
        journal.moved(after, RequestState.RUNNING, state, now)
        recovered.append(after)
    journal.write(connection)
    return recovered


def _lost(request: Request) -> RequestError:
    message = "the daemon was lost while this request ran"
    if request.lost_daemons:
        message += f", {request.lost_daemons + 1} times in all"
    hint = "submit it again; its log ends with its last output"
    return RequestError(ErrorKind.WORKER_LOST, message, hint)
