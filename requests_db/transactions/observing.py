# SPDX-License-Identifier: Apache-2.0
"""Writes the observed states of environments and replicas: functions over a connection.

The reconciler decides on what it read before, and the row may have changed since. A change of state
that is no longer allowed is dropped, as is one that changes nothing; both return None.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from sqlalchemy import Connection

from ...schema.states import (
    ENVIRONMENT_TRANSITIONS,
    UPDATABLE,
    EnvironmentState,
    GenerationState,
    ReplicaState,
)
from ...system.text.hidden_values import without_secrets
from ...system.text.json_lines import Json
from ..records import Environment, Event, Generation, Replica, RequestError
from ..sql import statements
from ..sql.rows import ENVIRONMENTS, REPLICAS
from . import generations
from .journal import ENVIRONMENT_STATE, GENERATION_STATE, REPLICA_STATE, write_event

log = logging.getLogger(__name__)


def find_environment(connection: Connection, name: str) -> Environment | None:
    """The environment of a name, ended or not."""
    found = connection.execute(statements.ENVIRONMENT_BY_NAME, {"of_name": name}).all()
    return ENVIRONMENTS.read_first(list(found))


def set_environment_state(
    connection: Connection,
    name: str,
    to_state: EnvironmentState,
    *,
    now: float,
    address: str | None = None,
    error: RequestError | None = None,
) -> Event | None:
    """Move an environment to a state; None when that changes nothing, or is no longer allowed.

    An address of None stays what it was. An error is kept while the state stays
    FAILED, and cleared by any other.
    """
    if (before := find_environment(connection, name)) is None:
        return None
    if before.state is not to_state and to_state not in ENVIRONMENT_TRANSITIONS[before.state]:
        text = "environment %s: transition from %s to %s refused"
        log.debug(text, name, before.state, to_state, extra={"environment": name})
        return None
    if error is not None:
        error = replace(error, message=without_secrets(error.message, before.spec))
    kept = before.error if to_state is before.state is EnvironmentState.FAILED else None
    after = replace(
        before,
        state=to_state,
        address=address if address is not None else before.address,
        error=error if error is not None else kept,
    )
    if after == before:
        return None
    after = replace(after, updated_at=now)
    values = ENVIRONMENTS.values(after)
    columns = ("state", "updated_at", "address", "error")
    given = {f"to_{column}": values[column] for column in columns}
    guard = {"of_name": name, "from_state": before.state.value}
    connection.execute(statements.MOVE_ENVIRONMENT, given | guard)
    generations.follow(connection, after, now)
    data = {"state": to_state.value, "address": after.address}
    if after.error is not None:
        data["error"] = after.error.message
    return write_event(connection, ENVIRONMENT_STATE, now, data, name)


def switch_generation(
    connection: Connection, generation: Generation, *, now: float, spec: Json, address: str
) -> tuple[Event, ...]:
    """Have a generation that is ready serve its environment; the one that served drains.

    Nothing when the environment was taken down meanwhile.
    """
    name = generation.environment
    before = find_environment(connection, name)
    if before is None or before.state not in UPDATABLE:
        return ()
    after = replace(
        before,
        state=EnvironmentState.READY,
        request_id=generation.request_id,
        generation=generation.number,
        spec=generations.spec_of(spec),
        address=address,
        error=None,
        updated_at=now,
    )
    connection.execute(statements.DELETE_ENVIRONMENT, {"of_name": name})
    connection.execute(statements.INSERT_ENVIRONMENT, ENVIRONMENTS.values(after))
    generations.move(connection, name, before.generation, GenerationState.DRAINING, now)
    generations.move(connection, name, generation.number, GenerationState.SERVING, now)
    data = {"state": after.state.value, "address": address, "generation": after.generation}
    return (write_event(connection, ENVIRONMENT_STATE, now, data, name),)


def end_generation(
    connection: Connection,
    generation: Generation,
    state: GenerationState,
    *,
    now: float,
    error: str | None = None,
) -> tuple[Event, ...]:
    """Write that nothing of a generation runs any more, and forget its replicas."""
    name, ending = generation.environment, f"%-{generation.request_id}"
    generations.move(connection, name, generation.number, state, now, error)
    connection.execute(statements.DELETE_REPLICAS_LIKE, {"of_environment": name, "like": ending})
    data = {"number": generation.number, "state": state.value, "error": error}
    return (write_event(connection, GENERATION_STATE, now, data, name),)


def set_replicas(connection: Connection, name: str, replicas: int, *, now: float) -> None:
    """Write how many replicas an environment is to have from now on."""
    if (before := find_environment(connection, name)) is None:
        return
    after = replace(before, spec=before.spec | {"replicas": replicas})
    given = {"to_spec": ENVIRONMENTS.values(after)["spec"], "to_updated_at": now}
    connection.execute(statements.SET_SPEC, given | {"of_name": name})


def upsert_replica(connection: Connection, replica: Replica, *, now: float) -> Event | None:
    """Write the observed state of a replica; None when it was written before.

    One that has stopped after it was drained is forgotten: it is wanted no more.
    """
    found = connection.execute(statements.REPLICA_BY_ID, {"of_id": replica.id}).one_or_none()
    values = REPLICAS.values(replica)
    if found is None:
        connection.execute(statements.INSERT_REPLICA, values)
    elif (before := REPLICAS.read(found)) == replica:
        return None
    elif before.state is ReplicaState.DRAINING and replica.state is ReplicaState.STOPPED:
        connection.execute(statements.DELETE_REPLICA, {"of_id": replica.id})
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
    return write_event(connection, REPLICA_STATE, now, data, replica.environment)


def delete_replicas(connection: Connection, environment: str) -> None:
    """Forget the replicas of an environment that has ended."""
    connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": environment})
