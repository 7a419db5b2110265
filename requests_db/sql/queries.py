# SPDX-License-Identifier: Apache-2.0
"""Looking without changing: functions over a connection."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from sqlalchemy import Connection

from ..records import Environment, Event, Expectation, Replica, Request
from ..results import Ambiguous, GetResult, NotFound
from ..states import RequestState, Schedule
from . import prepared, statements
from .rows import environment_of, event_of, expectation_of, replica_of, request_of

ID_LENGTH = 16
MAX_MATCHES = 10  # ids named when a prefix fits several
_HEX = frozenset("0123456789abcdef")

_newest_requests = cache(statements.newest_requests)
_events_after = cache(statements.events_after)


def get(connection: Connection, id_or_prefix: str) -> GetResult:
    """The request with this id, or the only one whose id begins so."""
    wanted = id_or_prefix.lower()
    if not wanted or not _HEX.issuperset(wanted) or len(wanted) > ID_LENGTH:
        return NotFound(id_or_prefix)
    if len(wanted) == ID_LENGTH:
        row = prepared.row(connection, statements.REQUEST_BY_ID, {"of_id": wanted})
        return NotFound(id_or_prefix) if row is None else request_of(row)
    # "g" comes after every hex digit: a range of the index, where LIKE would read the table.
    bounds = {"lowest": wanted, "beyond": f"{wanted}g", "up_to": MAX_MATCHES}
    rows = connection.execute(statements.REQUESTS_BY_PREFIX, bounds).all()
    if len(rows) > 1:
        return Ambiguous(tuple(row.id for row in rows))
    return request_of(rows[0]) if rows else NotFound(id_or_prefix)


def list_requests(
    connection: Connection,
    states: Collection[RequestState] | None,
    operation: str | None,
    environment: str | None,
    limit: int,
    before_seq: int | None,
) -> list[Request]:
    """Requests, newest first."""
    unfinished = bool(states) and not any(state.is_final for state in states or ())
    query = _newest_requests(
        by_state=bool(states),
        unfinished=unfinished,
        operation=operation is not None,
        environment=environment is not None,
        before=before_seq is not None,
    )
    parameters = {
        "states": [state.value for state in states] if states else None,
        "of_operation": operation,
        "of_environment": environment,
        "before_seq": before_seq,
    }
    given: dict[str, Any] = {key: value for key, value in parameters.items() if value is not None}
    return [request_of(row) for row in connection.execute(query, {**given, "up_to": limit})]


def events_after(
    connection: Connection,
    seq: int,
    request_id: str | None,
    environment: str | None,
    limit: int,
) -> list[Event]:
    """The next events after number `seq`, oldest first."""
    query = _events_after(request=request_id is not None, environment=environment is not None)
    parameters = {"of_request": request_id, "of_environment": environment}
    given: dict[str, Any] = {key: value for key, value in parameters.items() if value is not None}
    rows = connection.execute(query, {**given, "after_seq": seq, "up_to": limit})
    return [event_of(row) for row in rows]


def last_seq(connection: Connection) -> int:
    """The number of the last event; 0 before the first."""
    number: int = prepared.scalar(connection, statements.LAST_EVENT, {})
    return number


def counts(connection: Connection) -> dict[str, int]:
    """How many requests stand in each state."""
    row = connection.execute(statements.TALLY).one()
    return {state.value: count for state, count in zip(RequestState, row, strict=True)}


def pending_count(connection: Connection, schedule: Schedule) -> int:
    """How many requests of a schedule wait."""
    parameters = {"of_schedule": schedule.value}
    count: int = connection.execute(statements.COUNT_PENDING, parameters).scalar_one()
    return count


def running(connection: Connection) -> list[Request]:
    """The running requests, oldest first."""
    return [request_of(row) for row in connection.execute(statements.RUNNING_REQUESTS)]


def first_pending(connection: Connection, schedule: Schedule, limit: int) -> list[Request]:
    """The head of the queue: what would be claimed next."""
    parameters = {"of_schedule": schedule.value, "up_to": limit}
    return [request_of(row) for row in connection.execute(statements.FIRST_PENDING, parameters)]


def places(connection: Connection, schedule: Schedule, limit: int) -> dict[int, int]:
    """How many are ahead of each pending request, by its `seq`; of the first `limit`."""
    parameters = {"of_schedule": schedule.value, "up_to": limit}
    rows = prepared.rows(connection, statements.PLACES, parameters)
    return {seq: ahead for ahead, (seq,) in enumerate(rows)}


def expectations(connection: Connection, limit: int) -> list[Expectation]:
    """What peaks have taught, the latest first."""
    rows = connection.execute(statements.EXPECTATIONS, {"up_to": limit})
    return [expectation_of(row) for row in rows]


def environment(connection: Connection, name: str) -> Environment | None:
    """The environment of this name, live or not."""
    row = connection.execute(statements.ENVIRONMENT_BY_NAME, {"of_name": name}).one_or_none()
    return None if row is None else environment_of(row)


def environments(connection: Connection, include_stopped: bool) -> list[Environment]:
    """Environments by name."""
    stopped, others = statements.ALL_ENVIRONMENTS, statements.ENVIRONMENTS_NOT_STOPPED
    rows = connection.execute(stopped if include_stopped else others)
    return [environment_of(row) for row in rows]


def names(connection: Connection) -> list[str]:
    """The names of environments that are there, or come up: none that failed or was stopped."""
    return list(connection.execute(statements.NAMES).scalars())


def replicas(connection: Connection, environment: str | None) -> list[Replica]:
    """The replicas of one environment, or of all, by ordinal."""
    if environment is None:
        rows = connection.execute(statements.ALL_REPLICAS)
    else:
        rows = connection.execute(statements.REPLICAS_OF, {"of_environment": environment})
    return [replica_of(row) for row in rows]
