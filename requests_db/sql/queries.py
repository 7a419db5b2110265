# SPDX-License-Identifier: Apache-2.0
"""Queries that only read, and statements that are compiled once and go straight to the driver.

A query is one statement, its parameters, and what its rows become. A `Query` knows no connection:
the dispatcher's thread runs it in a transaction (`query.run(connection)`), the API's loop on
`aiosqlite` (`AsyncStore`).

Statements that every request pays for go straight to the driver. SQLAlchemy compiles a statement
once, too, but then still spends several times what SQLite itself takes on each execution and on
each row of parameters. So the statements of `statements.py` are translated to text once, and their
parameters to tuples. Lists (`IN`) cannot be parameters here: their length is part of the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql.base import Executable

from ...schema.states import ReplicaState, RequestState, Schedule
from ..records import RETRYING, Environment, Event, Generation, MemoryEstimate, Replica, Request
from . import statements
from .rows import ENVIRONMENTS, ESTIMATES, EVENTS, GENERATIONS, REPLICAS, REQUESTS, Row

Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A statement as the driver takes it: its text, and its parameters' values in their order."""

    text: str
    values: Callable[[Parameters], tuple[Any, ...]]


@cache
def prepare(statement: Executable, keys: tuple[str, ...]) -> Prepared:
    """The statement as text, for parameters of these names (an INSERT names its columns so)."""
    compiled: Any = statement.compile(  # type: ignore[attr-defined]
        dialect=sqlite.dialect(paramstyle="qmark"), column_keys=keys
    )
    names: list[str] = compiled.positiontup
    literals = {name: value for name, value in compiled.params.items() if name not in keys}
    return Prepared(str(compiled), _in_order(names, literals))


def rows(connection: Connection, statement: Executable, parameters: Parameters) -> list[Any]:
    """The rows that the statement returns, each a tuple."""
    prepared = prepare(statement, tuple(parameters))
    return _driver(connection).execute(prepared.text, prepared.values(parameters)).fetchall()  # type: ignore[no-any-return]


def row(connection: Connection, statement: Executable, parameters: Parameters) -> Any:
    """The only row, or None."""
    found = rows(connection, statement, parameters)
    return found[0] if found else None


def scalar(connection: Connection, statement: Executable, parameters: Parameters) -> Any:
    """The first value of the only row."""
    return rows(connection, statement, parameters)[0][0]


def each(connection: Connection, statement: Executable, many: Sequence[Parameters]) -> None:
    """Execute the statement once for each of `many`; nothing is returned."""
    if many:
        prepared = prepare(statement, tuple(many[0]))
        _driver(connection).executemany(prepared.text, map(prepared.values, many))


def _in_order(
    names: Sequence[str], literals: Parameters
) -> Callable[[Parameters], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda parameters: tuple((literals | parameters)[name] for name in names)
    pick: Callable[[Parameters], tuple[Any, ...]] = itemgetter(*names)
    if not literals:
        return pick
    return lambda parameters: pick(literals | parameters)


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


ID_LENGTH = 16
MAX_MATCHES = 10  # ids named when a prefix fits several
_HEX = frozenset("0123456789abcdef")

R = TypeVar("R", covariant=True)

_newest_requests = cache(statements.newest_requests)


@dataclass(frozen=True, slots=True)
class Query(Generic[R]):
    """One SELECT, and the function that makes the answer of its rows."""

    statement: Executable
    parameters: Parameters
    result: Callable[[list[Row]], R]

    def run(self, connection: Connection) -> R:
        """The answer, as this connection's transaction sees the database."""
        return self.result(rows(connection, self.statement, self.parameters))


def _count(rows: list[Row]) -> int:
    return int(rows[0][0])


def _names(rows: list[Row]) -> list[str]:
    return [name for (name,) in rows]


# The number of the last event; 0 before the first.
LAST_SEQ: Query[int] = Query(statements.LAST_EVENT, {}, _count)
# The running requests, oldest first.
RUNNING: Query[list[Request]] = Query(statements.RUNNING_REQUESTS, {}, REQUESTS.read_all)
# The latest arrival of an unfinished request, on the queue's clock; 0 if there is none.
LATEST_ARRIVAL = Query(statements.LATEST_ARRIVAL, {}, lambda rows: float(rows[0][0] or 0.0))
# For how many seconds daemons have run on this database, as it was last noted.
RUN_SECONDS: Query[float] = Query(statements.RUN_SECONDS, {}, lambda rows: float(rows[0][0]))
# How many failed launches there are of environments that have had no other launch.
NEVER_LAUNCHED_COUNT: Query[int] = Query(statements.NEVER_LAUNCHED_COUNT, {}, _count)
# The environments that were not stopped, by name; and those that have had another launch.
NOT_STOPPED = Query(statements.ENVIRONMENTS_NOT_STOPPED, {}, ENVIRONMENTS.read_all)
LAUNCHED_ENVIRONMENTS = Query(statements.LAUNCHED_ENVIRONMENTS, {}, ENVIRONMENTS.read_all)
# The names of environments that are neither failed nor stopped.
NAMES: Query[list[str]] = Query(statements.NAMES, {}, _names)
# The generations of all environments that are starting or draining.
UNSETTLED_GENERATIONS = Query(statements.UNSETTLED_GENERATIONS, {}, GENERATIONS.read_all)
# How many requests are in each state; every state is named.
COUNTS: Query[dict[str, int]] = Query(
    statements.TALLY,
    {},
    lambda rows: {s.value: count for s, count in zip(RequestState, rows[0], strict=True)},
)
# The names of environments that have failed or stopped.
ENDED_ENVIRONMENTS: Query[list[str]] = Query(statements.ENDED_ENVIRONMENTS, {}, _names)
# The name of each environment, by the request that launched it.
LAUNCHES: Query[dict[str, str]] = Query(statements.LAUNCHES, {}, dict)


def get(id_or_prefix: str) -> Query[Request | tuple[str, ...]]:
    """The request with this id or prefix; the ids of all matches, if not exactly one matches."""
    wanted = id_or_prefix.lower()
    if not wanted or not _HEX.issuperset(wanted):
        wanted = "g"  # no id begins with it

    def result(rows: list[Row]) -> Request | tuple[str, ...]:
        found = REQUESTS.read_all(rows)
        return found[0] if len(found) == 1 else tuple(request.id for request in found)

    if len(wanted) == ID_LENGTH:
        return Query(statements.REQUEST_BY_ID, {"of_id": wanted}, result)
    # "g" comes after every hex digit: a range of the index, where LIKE would read the table.
    bounds = {"lowest": wanted, "beyond": f"{wanted}g", "up_to": MAX_MATCHES}
    return Query(statements.REQUESTS_BY_PREFIX, bounds, result)


def request(id_: str) -> Query[Request | None]:
    """The request of this whole id."""
    return Query(statements.REQUEST_BY_ID, {"of_id": id_}, REQUESTS.read_first)


def list_requests(
    states: Collection[RequestState] | None = None,
    operation: str | None = None,
    environment: str | None = None,
    limit: int = 100,
) -> Query[list[Request]]:
    """Requests, newest first."""
    given = _given(of_operation=operation, of_environment=environment)
    statement = _newest_requests(frozenset(states or ()), frozenset(given))
    return Query(statement, {**given, "up_to": limit}, REQUESTS.read_all)


def events_after(seq: int, request_id: str | None = None, limit: int = 1000) -> Query[list[Event]]:
    """The next events after number `seq`, oldest first."""
    given = _given(of_request=request_id)
    statement = statements.EVENTS_OF_AFTER if given else statements.EVENTS_AFTER
    return Query(statement, {**given, "after_seq": seq, "up_to": limit}, EVENTS.read_all)


def newest_events(request_id: str, limit: int) -> Query[list[Event]]:
    """The last events of a request, newest first."""
    parameters = {"of_request": request_id, "up_to": limit}
    return Query(statements.NEWEST_EVENTS_OF, parameters, EVENTS.read_all)


def events_of_none(seq: int, limit: int) -> Query[dict[str, int]]:
    """The last of the next events after number `seq` that belong to no request, by environment."""
    return Query(statements.EVENTS_OF_NONE, {"after_seq": seq, "up_to": limit}, dict)


def retries_of(request_id: str) -> Query[list[Event]]:
    """The deaths for memory after which a request was queued again, oldest first."""

    def result(rows: list[Row]) -> list[Event]:
        return [e for e in EVENTS.read_all(rows) if e.data.get("phase") == RETRYING]

    return Query(statements.RETRIES_OF, {"of_request": request_id}, result)


def first_pending(schedule: Schedule, limit: int) -> Query[list[Request]]:
    """The head of the queue: the requests that would be claimed next."""
    parameters = {"of_schedule": schedule.value, "up_to": limit}
    return Query(statements.FIRST_PENDING, parameters, REQUESTS.read_all)


def places(schedule: Schedule, limit: int) -> Query[dict[int, int]]:
    """Return how many are ahead of each of the first `limit` pending requests, by its `seq`."""
    parameters = {"of_schedule": schedule.value, "up_to": limit}
    return Query(statements.PLACES, parameters, lambda rows: {r[0]: i for i, r in enumerate(rows)})


def memory_estimates(limit: int) -> Query[list[MemoryEstimate]]:
    """The memory estimates, the latest first."""
    return Query(statements.LATEST_ESTIMATES, {"up_to": limit}, ESTIMATES.read_all)


def environment(name: str) -> Query[Environment | None]:
    """The environment of this name, ended or not."""
    return Query(statements.ENVIRONMENT_BY_NAME, {"of_name": name}, ENVIRONMENTS.read_first)


def never_launched(limit: int) -> Query[list[Request]]:
    """The failed launches of environments that have had no other launch, newest first."""
    return Query(statements.NEVER_LAUNCHED, {"up_to": limit}, REQUESTS.read_all)


def generations(environment: str) -> Query[list[Generation]]:
    """The generations of one environment, newest first."""
    return Query(statements.GENERATIONS_OF, {"of_environment": environment}, GENERATIONS.read_all)


def _by_environment(rows: list[Row]) -> defaultdict[str, list[Replica]]:
    found: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in REPLICAS.read_all(rows):
        found[replica.environment].append(replica)
    return found


# All replicas, by ordinal, of each environment.
REPLICAS_OF_EACH = Query(statements.ALL_REPLICAS, {}, _by_environment)


def replicas(environment: str) -> Query[list[Replica]]:
    """The replicas of one environment, by ordinal."""
    return Query(statements.REPLICAS_OF, {"of_environment": environment}, REPLICAS.read_all)


def replica_states(environment: str) -> Query[dict[str, ReplicaState]]:
    """The state of each replica of an environment, by id, in the order of `replicas`."""

    def result(rows: list[Row]) -> dict[str, ReplicaState]:
        return {id_: ReplicaState(state) for id_, state in rows}

    return Query(statements.REPLICA_STATES_OF, {"of_environment": environment}, result)


def _given(**parameters: Any) -> Parameters:
    """The parameters that are not None: each adds a condition of its own."""
    return {name: value for name, value in parameters.items() if value is not None}
