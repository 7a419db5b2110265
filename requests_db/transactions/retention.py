# SPDX-License-Identifier: Apache-2.0
"""Removes what is old: ended requests with their events, environments that ended long ago.

How long ago something happened is told by no wall clock, which may step by a day or by years, but
by how long daemons have run since. `note_time` adds to these seconds and, now and then, marks which
event was the last: what had no event since a mark that is old enough is old.
"""

from __future__ import annotations

from sqlalchemy import Connection

from ...schema.states import RequestState
from ..connections import WriteConnection
from ..sql import queries, statements
from . import observing
from .journal import Journal

BATCH = 500  # requests per transaction: other writers get their turn between them
MAX_ESTIMATES = 1000  # operations and sources; the latest are read again by the next daemon
_MARKS = 100  # for the time that things are kept: it is kept to the hundredth part


def note_time(connection: Connection, elapsed_seconds: float, keep_seconds: float) -> int:
    """Add to the time that daemons have run; returns the last event that is older than to be kept.

    Args:
        connection: in a transaction.
        elapsed_seconds: for which the daemon has run since it noted that before.
        keep_seconds: for how long things are kept.
    """
    added = queries.row(connection, statements.ADD_RUN_SECONDS, {"elapsed": elapsed_seconds})
    run_seconds, last_event = added
    newest = queries.scalar(connection, statements.NEWEST_MARK, {})
    if newest is None or run_seconds - newest > keep_seconds / _MARKS:
        mark = {"run_seconds": run_seconds, "last_event": last_event}
        queries.each(connection, statements.INSERT_MARK, [mark])
    until = {"until": run_seconds - keep_seconds}
    queries.each(connection, statements.DELETE_MARKS, [until])
    passed = queries.row(connection, statements.OLD_EVENT, until)
    return 0 if passed is None else int(passed[0])


def collect(store: WriteConnection, old_event: int, keep_requests: int) -> list[str]:
    """Remove ended requests with their events; never a launch of an environment that may run.

    Then old events of environments and replicas, and memory estimates beyond the latest. Several
    transactions.

    Args:
        store: the database.
        old_event: requests without an event after this one are removed.
        keep_requests: how many of the newest ended requests stay, unless they are that old.

    Returns:
        The ids of the removed requests.
    """
    removed: list[str] = []
    while batch := store.write(_collect_batch, old_event, keep_requests):
        removed += batch
    store.write(_collect_old, old_event)
    return removed


def _collect_batch(connection: Connection, old_event: int, keep_requests: int) -> list[str]:
    bound = connection.execute(statements.COLLECT_UP_TO, {"keep": keep_requests}).scalar()
    parameters = {"old": old_event, "up_to_seq": bound or 0, "up_to": BATCH}
    rows = connection.execute(statements.COLLECTABLE, parameters).all()
    if not rows:
        return []
    seqs = [row.seq for row in rows]
    journal = Journal()
    for row in rows:
        journal.removed(RequestState(row.state))
    connection.execute(statements.DELETE_EVENTS_OF, {"seqs": seqs})
    connection.execute(statements.DELETE_REQUESTS, {"seqs": seqs})
    journal.write(connection)
    return [row.id for row in rows]


def _collect_old(connection: Connection, old_event: int) -> None:
    connection.execute(statements.DELETE_OLD_EVENTS, {"old": old_event})
    connection.execute(statements.DELETE_OLD_ESTIMATES, {"keep": MAX_ESTIMATES})


def collect_environments(connection: Connection, old_event: int) -> list[str]:
    """Remove ended environments that had no event after `old_event`. Their names."""
    parameters = {"old": old_event}
    names = list(connection.execute(statements.FORGOTTEN_ENVIRONMENTS, parameters).scalars())
    for name in names:
        connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": name})
        connection.execute(statements.DELETE_ENVIRONMENT, {"of_name": name})
        observing.forget(connection, name)
    return names
