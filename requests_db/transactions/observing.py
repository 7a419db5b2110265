# SPDX-License-Identifier: Apache-2.0
"""Writes the observed states of environments and replicas: functions over a connection.

The reconciler decides on what it read before, and the row may have changed since. A change of state
that is no longer allowed is dropped, as is one that changes nothing; both return None.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from sqlalchemy import Connection

from ..records import Event, Replica, RequestError
from ..sql import statements
from ..sql.rows import ENVIRONMENTS, REPLICAS
from ..states import EnvironmentState
from ..transitions import may_follow
from .journal import ENVIRONMENT_STATE, REPLICA_STATE, Journal

log = logging.getLogger(__name__)


def set_environment_state(
    connection: Connection,
    name: str,
    to_state: EnvironmentState,
    *,
    now: float,
    address: str | None = None,
    error: RequestError | None = None,
    request_id: str | None = None,
) -> Event | None:
    """Move an environment to a state; None when that changes nothing, or is no longer allowed.

    An address or request id of None stays what it was. An error is kept while the state stays
    FAILED, and cleared by any other.
    """
    found = connection.execute(statements.ENVIRONMENT_BY_NAME, {"of_name": name}).one_or_none()
    if found is None:
        return None
    before = ENVIRONMENTS.read(found)
    if before.state is not to_state and not may_follow(before.state, to_state):
        text = "environment %s: transition from %s to %s refused"
        log.debug(text, name, before.state, to_state, extra={"environment": name})
        return None
    kept = before.error if to_state is before.state is EnvironmentState.FAILED else None
    after = replace(
        before,
        state=to_state,
        address=address if address is not None else before.address,
        error=error if error is not None else kept,
        request_id=request_id if request_id is not None else before.request_id,
    )
    if after == before:
        return None
    after = replace(after, updated_at=now)
    values = ENVIRONMENTS.values(after)
    columns = ("state", "updated_at", "address", "error", "request_id")
    given = {f"to_{column}": values[column] for column in columns}
    guard = {"of_name": name, "from_state": before.state.value}
    connection.execute(statements.MOVE_ENVIRONMENT, given | guard)
    data = {"state": to_state.value, "address": after.address}
    if after.error is not None:
        data["error"] = after.error.message
    journal = Journal()
    journal.noted(ENVIRONMENT_STATE, now, data, environment=name)
    return journal.write(connection)[0]


def upsert_replica(connection: Connection, replica: Replica, *, now: float) -> Event | None:
    """Write the observed state of a replica; None when it was written before."""
    found = connection.execute(statements.REPLICA_BY_ID, {"of_id": replica.id}).one_or_none()
    values = REPLICAS.values(replica)
    if found is None:
        connection.execute(statements.INSERT_REPLICA, values)
    elif REPLICAS.read(found) == replica:
        return None
    else:
        given = {f"to_{column}": value for column, value in values.items()}
        connection.execute(statements.UPDATE_REPLICA, given)
    data = {
        "id": replica.id,
        "ordinal": replica.ordinal,
        "state": replica.state.value,
        "pid": replica.pid,
        "restarts": replica.restarts,
        "exit": replica.exit,
    }
    journal = Journal()
    journal.noted(REPLICA_STATE, now, data, environment=replica.environment)
    return journal.write(connection)[0]


def delete_replicas(connection: Connection, environment: str) -> None:
    """Forget the replicas of an environment that has ended."""
    connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": environment})
