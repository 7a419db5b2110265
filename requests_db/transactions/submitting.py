# SPDX-License-Identifier: Apache-2.0
"""Submits and cancels requests: functions over a connection, each one transaction's work."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from ..records import Environment, Event, NewRequest
from ..results import (
    Cancellation,
    Duplicate,
    KeyReused,
    NameTaken,
    QueueFull,
    SubmitResult,
    Submitted,
)
from ..sql import prepared, statements
from ..sql.rows import ENVIRONMENTS, REQUESTS, insert_values, new_request
from ..states import EnvironmentState, RequestState, Schedule
from .journal import ENVIRONMENT_STATE, Journal
from .observing import set_environment_state

_ID_BYTES = 8


def submit(
    connection: Connection,
    new: NewRequest,
    *,
    now: float,
    arrival: float | None = None,
    environment: Environment | None = None,
    max_pending: int | None = None,
    stopping: str | None = None,
) -> SubmitResult:
    """Write a request.

    Args:
        connection: in a transaction.
        new: the request. Its idempotency key finds the request that has it already; one of
            another operation or payload is refused.
        now: seconds since the epoch, for people.
        arrival: the same on the queue's clock, by which requests age; `now` if there is none.
        environment: takes its name in the same transaction; its row points to the request.
        max_pending: how many requests of its schedule may wait.
        stopping: the name of an environment that is STOPPING from then on; a launch of it that is
            still under way, which would bring it up again, is cancelled.
    """
    refusal = _refusal(connection, new, environment, max_pending)
    if refusal is not None:
        return refusal
    request_id = secrets.token_hex(_ID_BYTES)
    draft = new_request(request_id, new, now, now if arrival is None else arrival)
    seq = prepared.scalar(connection, statements.INSERT_REQUEST, insert_values(draft))
    request = replace(draft, seq=seq)
    journal = Journal()
    journal.created(request, now)
    if environment is not None:
        _take_name(connection, replace(environment, request_id=request.id), journal)
    events = journal.write(connection)
    if stopping is None:
        return Submitted(request, events)
    marked, called_off = _stop(connection, stopping, now)
    if called_off is None:
        return Submitted(request, events + marked)
    ends = called_off.request.id if called_off.is_under_way else None
    return Submitted(request, events + marked + called_off.events, ends)


def adopt(connection: Connection, environment: Environment) -> tuple[Event, ...]:
    """Write an environment that runs, and whose launch is in no table."""
    journal = Journal()
    _take_name(connection, environment, journal)
    return journal.write(connection)


def cancel(connection: Connection, request_id: str, now: float) -> Cancellation | None:
    """Cancel a pending request; note for a running one that it is to be cancelled."""
    row = connection.execute(statements.REQUEST_BY_ID, {"of_id": request_id}).one_or_none()
    if row is None:
        return None
    request = REQUESTS.read(row)
    if request.state.is_final:
        return Cancellation(request, request.state)
    parameters = {"of_id": request_id, "now": now}
    if request.state is RequestState.RUNNING:
        connection.execute(statements.ASK_TO_CANCEL, parameters)
        asked_at = request.cancel_requested_at or now
        return Cancellation(replace(request, cancel_requested_at=asked_at), request.state)
    connection.execute(statements.CANCEL_PENDING, parameters)
    cancelled = replace(
        request, state=RequestState.CANCELLED, finished_at=now, cancel_requested_at=now
    )
    journal = Journal()
    journal.moved(cancelled, request.state, RequestState.CANCELLED, now)
    return Cancellation(cancelled, request.state, journal.write(connection))


def _refusal(
    connection: Connection,
    new: NewRequest,
    environment: Environment | None,
    max_pending: int | None,
) -> Duplicate | KeyReused | NameTaken | QueueFull | None:
    """The reason to write nothing; None if there is none. An existing request comes first."""
    if new.idempotency_key is not None:
        known = _one(connection, statements.REQUEST_BY_KEY, key=new.idempotency_key)
        if known is not None:
            first = REQUESTS.read(known)
            is_same = (first.operation, first.payload) == (new.operation, new.payload)
            return Duplicate(first) if is_same else KeyReused(first)
    if environment is not None:
        name = environment.name
        found = _one(connection, statements.ENVIRONMENT_BY_NAME, of_name=name)
        if found is not None and (holder := ENVIRONMENTS.read(found)).state.is_live:
            return NameTaken(holder)
    if max_pending is not None and _is_full(connection, new.schedule, max_pending):
        return QueueFull(max_pending)
    return None


def _is_full(connection: Connection, schedule: Schedule, max_pending: int) -> bool:
    """Each schedule has room of its own: a queue full of launches still takes a `down`."""
    pending: int = prepared.scalar(connection, statements.PENDING_TALLY, {})
    if pending < max_pending:
        return False
    parameters = {"of_schedule": schedule.value}
    of_schedule: int = prepared.scalar(connection, statements.PENDING_OF, parameters)
    return of_schedule >= max_pending


def _stop(
    connection: Connection, name: str, now: float
) -> tuple[tuple[Event, ...], Cancellation | None]:
    """Mark the environment as stopping, and cancel its launch while that is under way."""
    found = _one(connection, statements.ENVIRONMENT_BY_NAME, of_name=name)
    marked = set_environment_state(connection, name, EnvironmentState.STOPPING, now=now)
    events = () if marked is None else (marked,)
    if found is None:
        return events, None
    environment = ENVIRONMENTS.read(found)
    under_way = environment.state in (EnvironmentState.PENDING, EnvironmentState.STARTING)
    if not under_way or environment.request_id is None:
        return events, None
    return events, cancel(connection, environment.request_id, now)


def _one(connection: Connection, statement: Any, **parameters: Any) -> Any:
    return connection.execute(statement, parameters).one_or_none()


def _take_name(connection: Connection, environment: Environment, journal: Journal) -> None:
    """Write the environment in the place of an ended one of the same name."""
    connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": environment.name})
    connection.execute(statements.DELETE_ENVIRONMENT, {"of_name": environment.name})
    connection.execute(statements.INSERT_ENVIRONMENT, ENVIRONMENTS.values(environment))
    journal.noted(
        ENVIRONMENT_STATE,
        environment.created_at,
        {"state": environment.state.value, "address": environment.address},
        environment=environment.name,
    )
