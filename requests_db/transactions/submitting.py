# SPDX-License-Identifier: Apache-2.0
"""Submits and cancels requests: functions over a connection, each one transaction's work.

A launch takes its environment's name. If one of the name runs, the launch updates it: the row stays
as it is, and the launch becomes its next generation, whose payload names the launch it replaces.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from sqlalchemy import Connection

from ...schema import states
from ...schema.spec import without_ref
from ...system.text.json_lines import Json
from .. import records
from ..records import Cancellation, Environment, Event, NewRequest, Refusal, Request, SubmitResult
from ..sql import queries, statements
from ..sql.rows import ENVIRONMENTS, REQUESTS, new_request
from . import observing
from .journal import ENVIRONMENT_STATE, Journal

# Operations that change an environment: one at a time, except for `down`, which cancels others.
CHANGES = ("launch", "down", "scale", "restart")
ALTERING = ("scale", "restart")
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
    changing: str | None = None,
) -> SubmitResult:
    """Write a request.

    Args:
        connection: in a transaction.
        new: the request. Its idempotency key finds the request that has it already; one of
            another operation or payload is refused.
        now: seconds since the epoch, for people.
        arrival: the same on the queue's clock, by which requests age; `now` if there is none.
        environment: takes its name in the same transaction; its row points to the request. One of
            the name that runs is updated instead.
        max_pending: how many requests of its schedule may wait.
        stopping: the name of an environment that is STOPPING from then on; a request that
            launches or changes it, and is still under way, is cancelled.
        changing: the name of an environment that has to serve, and that no other request changes.
    """
    holder = None if environment is None else _live_holder(connection, environment.name)
    refusal = _refusal(connection, new, holder, max_pending, changing)
    if refusal is not None:
        return refusal
    if environment is not None:
        replaces = None if holder is None else holder.request_id
        new = replace(new, payload={**new.payload, "replaces": replaces})
    request_id = secrets.token_hex(_ID_BYTES)
    draft = new_request(request_id, new, now, now if arrival is None else arrival)
    values = REQUESTS.values(draft)
    del values["seq"]  # the database gives it
    seq = queries.scalar(connection, statements.INSERT_REQUEST, values)
    request = replace(draft, seq=seq)
    journal = Journal()
    journal.created(request, now)
    if environment is not None:
        spec = observing.spec_of(environment.spec)
        environment = replace(environment, request_id=request.id, spec=spec)
        if holder is None:
            _take_name(connection, environment, journal)
        else:  # another generation of what has the name
            observing.begin(connection, environment)
    events = journal.write(connection)
    if stopping is None:
        return records.Submitted(request, events)
    marked, ends = _stop(connection, stopping, now)
    return records.Submitted(request, events + marked, tuple(ends))


def adopt(connection: Connection, environment: Environment) -> tuple[Event, ...]:
    """Write an environment that runs, and whose launch is in no table."""
    journal = Journal()
    _take_name(connection, environment, journal)
    return journal.write(connection)


def cancel(connection: Connection, request_id: str, now: float) -> Cancellation | None:
    """Cancel a pending request; mark a running one for cancellation."""
    request = queries.request(request_id).run(connection)
    if request is None:
        return None
    if request.state.is_final:
        return Cancellation(request, request.state)
    is_running = request.state is states.RequestState.RUNNING
    statement = statements.ASK_TO_CANCEL if is_running else statements.CANCEL_PENDING
    connection.execute(statement, {"of_id": request_id, "now": now})
    after = queries.request(request_id).run(connection) or request
    journal = Journal()
    if after.state is not request.state:
        journal.moved(after, request.state, after.state, now)
    return Cancellation(after, request.state, journal.write(connection))


def _refusal(
    connection: Connection,
    new: NewRequest,
    holder: Environment | None,
    max_pending: int | None,
    changing: str | None,
) -> Refusal | None:
    """The reason to write nothing; None if there is none. An existing request comes first."""
    if new.idempotency_key is not None:
        key = {"key": new.idempotency_key}
        if (known := queries.row(connection, statements.REQUEST_BY_KEY, key)) is not None:
            first = REQUESTS.read(known)
            asked = dict.fromkeys(observing.OF_UPDATE & first.payload.keys())
            is_same = (first.operation, first.payload | asked) == (
                new.operation,
                new.payload | asked,
            )
            return records.Duplicate(first) if is_same else records.KeyReused(first)
    if changing is not None and (why := _cannot_change(connection, changing)) is not None:
        return why
    if holder is not None and (refusal := _why_no_update(connection, new, holder)) is not None:
        return refusal
    if max_pending is not None and _is_full(connection, new.schedule, max_pending):
        return records.QueueFull(max_pending)
    return None


def _why_no_update(connection: Connection, new: NewRequest, holder: Environment) -> Refusal | None:
    if changes := _changes(connection, holder.name, ALTERING):
        return records.CannotChange(holder, changes[0])
    for generation in queries.generations(holder.name).run(connection):
        is_starting = generation.state is states.GenerationState.STARTING
        if is_starting and generation.request_id != holder.request_id:
            launch = queries.request(generation.request_id).run(connection)
            if launch is not None and not (launch.state.is_final or launch.cancel_requested_at):
                return records.BeingUpdated(generation)
    wanted = new.payload.get("update")
    serves = holder.state in states.UPDATABLE or _is_just_launched(connection, holder)
    if wanted is False or not serves:
        return records.NameTaken(holder)
    if not wanted and _source_of(new.payload) != _source_of(holder.spec):
        return records.OtherSource(holder)
    return None


def _source_of(spec: Json) -> tuple[str | None, ...]:
    """Return what is launched, with the folder it is found from if the text is not enough."""
    source = without_ref(str(spec.get("source")))
    is_whole = source.startswith("/") or "://" in source or not set(source) & set("/.:")
    return (source,) if is_whole else (source, spec.get("cwd"))


def _cannot_change(connection: Connection, name: str) -> records.CannotChange | None:
    environment = queries.environment(name).run(connection)
    assert environment is not None  # none is removed that may be changed
    if changes := _changes(connection, name, CHANGES):
        return records.CannotChange(environment, changes[0])
    if environment.state in states.SERVING or _is_just_launched(connection, environment):
        return None
    return records.CannotChange(environment)


def _is_just_launched(connection: Connection, environment: Environment) -> bool:
    """Return whether its launch succeeded, and the reconciler has not written its state yet."""
    return _end_of_launch(connection, environment) is states.RequestState.SUCCEEDED


def _end_of_launch(connection: Connection, environment: Environment) -> states.RequestState | None:
    """The final state of an environment's launch which the reconciler has not acted on yet."""
    if environment.state not in (states.EnvironmentState.PENDING, states.EnvironmentState.STARTING):
        return None
    launch = queries.request(str(environment.request_id)).run(connection)
    return launch.state if launch is not None and launch.state.is_final else None


def _changes(connection: Connection, name: str, operations: tuple[str, ...]) -> list[Request]:
    """Requests that change an environment and have not ended, the oldest first."""
    parameters = {"of_environment": name, "operations": list(operations)}
    return REQUESTS.read_all(connection.execute(statements.CHANGES_OF, parameters).all())


def _is_full(connection: Connection, schedule: states.Schedule, max_pending: int) -> bool:
    """Each schedule has room of its own: a queue full of launches still takes a `down`."""
    pending: int = queries.scalar(connection, statements.PENDING_TALLY, {})
    if pending < max_pending:
        return False
    parameters = {"of_schedule": schedule.value}
    of_schedule: int = queries.scalar(connection, statements.PENDING_OF, parameters)
    return of_schedule >= max_pending


def _stop(connection: Connection, name: str, now: float) -> tuple[tuple[Event, ...], list[str]]:
    """Mark it as stopping, and cancel its launches; return the events, and those that run."""
    stopping = states.EnvironmentState.STOPPING
    marked = observing.set_environment_state(connection, name, stopping, now=now)
    events: tuple[Event, ...] = () if marked is None else (marked,)
    ends: list[str] = []
    generations = queries.generations(name).run(connection)
    under_way = [g.request_id for g in generations if g.state is states.GenerationState.STARTING]
    under_way += [change.id for change in _changes(connection, name, ALTERING)]
    for request_id in under_way:
        if (called_off := cancel(connection, request_id, now)) is not None:
            events += called_off.events
            ends += [request_id] if called_off.is_under_way else []
    return events, ends


def _live_holder(connection: Connection, name: str) -> Environment | None:
    """The environment that has the name now; one that is being updated has it, failed or not."""
    found = queries.environment(name).run(connection)
    if found is None or not found.state.is_live:
        return None
    is_free = (states.RequestState.FAILED, states.RequestState.CANCELLED)
    return None if _end_of_launch(connection, found) in is_free else found


def _take_name(connection: Connection, environment: Environment, journal: Journal) -> None:
    """Write the environment, with its generation, in the place of an ended one of its name."""
    environment = replace(environment, generation=observing.begin(connection, environment))
    connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": environment.name})
    connection.execute(statements.REPLACE_ENVIRONMENT, ENVIRONMENTS.values(environment))
    data = {"state": environment.state.value, "address": environment.address}
    journal.noted(ENVIRONMENT_STATE, environment.created_at, data, environment.name)
