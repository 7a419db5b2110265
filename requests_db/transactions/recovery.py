# SPDX-License-Identifier: Apache-2.0
"""Settles the requests that a lost daemon left RUNNING: once, before a daemon claims.

The caller first ends the workers that may still be alive (`queries.running` names them).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from sqlalchemy import Connection

from ...schema.states import ErrorKind, RequestState
from ..records import Outcome, Request, RequestError
from ..results import Recovery
from ..sql import prepared, statements
from ..sql.rows import REQUESTS
from .dispatching import finish_values
from .journal import Journal

# A daemon that is killed is no failure of what ran; but what ends each one must not run for ever.
MAX_LOST_DAEMONS = 10


def next_state(request: Request, idempotent: Set[str]) -> RequestState:
    """The state of a request whose daemon was lost: PENDING again, FAILED or CANCELLED."""
    if request.cancel_requested_at is not None:
        return RequestState.CANCELLED
    again = request.operation in idempotent and request.lost_daemons < MAX_LOST_DAEMONS
    return RequestState.PENDING if again else RequestState.FAILED


def recover(connection: Connection, now: float, *, idempotent: Set[str]) -> Recovery:
    """Move every running request to its next state. `idempotent`: operations to run again."""
    running = [REQUESTS.read(row) for row in connection.execute(statements.RUNNING_REQUESTS)]
    moved = [_after(request, next_state(request, idempotent), now) for request in running]
    journal = Journal()
    for request in moved:
        journal.moved(request, RequestState.RUNNING, request.state, now)
    by_state = {state: tuple(r for r in moved if r.state is state) for state in RequestState}
    requeued = by_state[RequestState.PENDING]
    ended = [request for request in moved if request.state.is_final]
    if requeued:
        connection.execute(statements.REQUEUE, [{"of_id": request.id} for request in requeued])
    for request in ended:
        outcome = Outcome(request.id, request.state, now, error=request.error)
        prepared.rows(connection, statements.FINISH, finish_values(outcome))
    return Recovery(
        requeued=requeued,
        failed=by_state[RequestState.FAILED],
        cancelled=by_state[RequestState.CANCELLED],
        events=journal.write(connection),
    )


def _after(request: Request, state: RequestState, now: float) -> Request:
    if state is RequestState.PENDING:
        attempts, lost = request.attempts - 1, request.lost_daemons + 1
        request = replace(request, state=state, attempts=attempts, lost_daemons=lost)
        return replace(
            request, started_at=None, worker=None, worker_pid=None, worker_started_at=None
        )
    error = _lost(request) if state is RequestState.FAILED else None
    return replace(request, state=state, finished_at=now, error=error)


def _lost(request: Request) -> RequestError:
    message = "the daemon was lost while this request ran"
    if request.lost_daemons:
        message += f", {request.lost_daemons + 1} times in all"
    hint = "submit it again; its log ends with its last output"
    return RequestError(ErrorKind.WORKER_LOST, message, hint)
