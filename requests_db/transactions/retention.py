# SPDX-License-Identifier: Apache-2.0
"""Removes what is old: ended requests with their events, environments that ended long ago."""

from __future__ import annotations

from sqlalchemy import Connection

from ..sql import statements
from ..states import RequestState
from .journal import Journal

BATCH = 500  # requests per transaction: other writers get their turn between them


def collect(
    connection: Connection, now: float, keep_requests: int, keep_seconds: float
) -> list[str]:
    """Remove up to `BATCH` ended requests; never the launch of a live environment.

    Args:
        connection: in a transaction.
        now: seconds since the epoch.
        keep_requests: how many of the newest ended requests stay...
        keep_seconds: ...unless they ended longer ago than this.

    Returns:
        The ids of the removed requests.
    """
    bound = connection.execute(statements.COLLECT_UP_TO, {"keep": keep_requests}).scalar()
    parameters = {"finished_before": now - keep_seconds, "up_to_seq": bound or 0, "up_to": BATCH}
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


def collect_old(connection: Connection, now: float, keep_seconds: float) -> None:
    """Remove old events of environments and replicas, and old memory estimates."""
    parameters = {"before": now - keep_seconds}
    connection.execute(statements.DELETE_OLD_EVENTS, parameters)
    connection.execute(statements.DELETE_OLD_ESTIMATES, parameters)


def collect_environments(connection: Connection, now: float, keep_seconds: float) -> list[str]:
    """Remove environments that ended longer than `keep_seconds` ago. Their names."""
    parameters = {"before": now - keep_seconds}
    names = list(connection.execute(statements.FORGOTTEN_ENVIRONMENTS, parameters).scalars())
    for name in names:
        connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": name})
        connection.execute(statements.DELETE_ENVIRONMENT, {"of_name": name})
    return names
