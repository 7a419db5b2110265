# SPDX-License-Identifier: Apache-2.0
"""Writes the observed states of environments and replicas, and the history of environments.

The reconciler decides on what it read before, and the row may have changed since. A change of state
that is no longer allowed is dropped, as is one that changes nothing; both return None.

The history has a generation for each launch:

    begin      a launch was submitted: STARTING
    follow     its environment's state has changed: SERVING when it is ready, RETIRED when it was
               taken down, FAILED with the environment's error

Each is written in the transaction of the change that causes it, so that the two never differ.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection

from ...schema import states
from ...system.text.json_lines import Json
from ...system.text.safe_text import redact, without_secrets
from ..records import Environment, Event, Generation, Replica, RequestError
from ..sql import queries, statements
from ..sql.rows import ENVIRONMENTS, GENERATIONS, REPLICAS
from .journal import ENVIRONMENT_STATE, GENERATION_STATE, REPLICA_STATE, write_event

_SHOWN_OF_REPLICA = ("id", "ordinal", "state", "pid", "restarts", "exit")


def set_environment_state(
    connection: Connection,
    name: str,
    to_state: states.EnvironmentState,
    *,
    now: float,
    address: str | None = None,
    error: RequestError | None = None,
) -> Event | None:
    """Move an environment (`in_state`); None: nothing changes, or it is no longer allowed."""
    if (before := queries.environment(name).run(connection)) is None:
        return None
    if to_state not in {before.state, *states.ENVIRONMENT_TRANSITIONS[before.state]}:
        return None
    after = in_state(before, to_state, address, error)
    if after == before:
        return None
    after = replace(after, updated_at=now)
    given = ENVIRONMENTS.parameters(after, "state", "updated_at", "address", "error")
    guard = {"of_name": name, "from_state": before.state.value}
    connection.execute(statements.MOVE_ENVIRONMENT, given | guard)
    follow(connection, after, now)
    data = {"state": to_state.value, "address": after.address}
    if after.error is not None:
        data["error"] = after.error.message
    return write_event(connection, ENVIRONMENT_STATE, now, data, name)


def in_state(
    before: Environment,
    state: states.EnvironmentState,
    address: str | None,
    error: RequestError | None,
) -> Environment:
    """Return an environment with this state.

    An address of None stays what it was. An error stays with FAILED, and is cleared otherwise.
    """
    if error is not None:
        error = replace(error, message=without_secrets(error.message, before.spec))
    elif state is before.state is states.EnvironmentState.FAILED:
        error = before.error
    return replace(before, state=state, address=address or before.address, error=error)


def switch_generation(
    connection: Connection, generation: Generation, *, now: float, spec: Json, address: str
) -> tuple[Event, ...]:
    """Make a ready generation serve, and the present one drain, unless it was taken down."""
    name = generation.environment
    before = queries.environment(name).run(connection)
    if before is None or before.state not in states.UPDATABLE:
        return ()
    after = replace(
        before,
        state=states.EnvironmentState.READY,
        request_id=generation.request_id,
        generation=generation.number,
        spec=spec_of(spec),
        address=address,
        error=None,
        updated_at=now,
    )
    connection.execute(statements.REPLACE_ENVIRONMENT, ENVIRONMENTS.values(after))
    move(connection, name, before.generation, states.GenerationState.DRAINING, now)
    move(connection, name, generation.number, states.GenerationState.SERVING, now)
    data = {"state": after.state.value, "address": address, "generation": after.generation}
    return (write_event(connection, ENVIRONMENT_STATE, now, data, name),)


def end_generation(
    connection: Connection,
    generation: Generation,
    state: states.GenerationState,
    *,
    now: float,
    error: str | None = None,
) -> tuple[Event, ...]:
    """Write that nothing of a generation runs any more, and forget its replicas."""
    name, ending = generation.environment, f"%-{generation.request_id}"
    move(connection, name, generation.number, state, now, error)
    connection.execute(statements.DELETE_REPLICAS_LIKE, {"of_environment": name, "like": ending})
    data = {"number": generation.number, "state": state.value, "error": error}
    return (write_event(connection, GENERATION_STATE, now, data, name),)


def set_replicas(connection: Connection, name: str, replicas: int, *, now: float) -> None:
    """Write how many replicas an environment should have from now on."""
    if (before := queries.environment(name).run(connection)) is None:
        return
    after = replace(before, spec=before.spec | {"replicas": replicas}, updated_at=now)
    connection.execute(statements.REPLACE_ENVIRONMENT, ENVIRONMENTS.values(after))


def upsert_replica(connection: Connection, replica: Replica, *, now: float) -> Event | None:
    """Write the observed state of a replica; None when it was written before.

    A replica that has stopped after a drain is deleted, because it is not wanted any more.
    """
    rows = queries.rows(connection, statements.REPLICA_BY_ID, {"of_id": replica.id})
    if (before := REPLICAS.read_first(rows)) == replica:
        return None
    was_draining = before is not None and before.state is states.ReplicaState.DRAINING
    if was_draining and replica.state is states.ReplicaState.STOPPED:
        connection.execute(statements.DELETE_REPLICA, {"of_id": replica.id})
    else:
        connection.execute(statements.REPLACE_REPLICA, REPLICAS.values(replica))
    data = {name: getattr(replica, name) for name in _SHOWN_OF_REPLICA}
    return write_event(connection, REPLICA_STATE, now, data, replica.environment)


def delete_replicas(connection: Connection, environment: str) -> None:
    """Forget the replicas of an environment that has ended."""
    connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": environment})


KEPT = 20  # of each environment: the newest
_EVERY = 2**31  # beyond every number
CANCELLED = "it was cancelled before it was ready"

# The fields of a launch's payload that say how it takes its name, and not what is launched.
OF_UPDATE = frozenset({"update", "replaces", "drain_timeout_seconds"})

_STATE_OF = {
    states.EnvironmentState.READY: states.GenerationState.SERVING,
    states.EnvironmentState.DEGRADED: states.GenerationState.SERVING,
    states.EnvironmentState.ASLEEP: states.GenerationState.SERVING,
    states.EnvironmentState.FAILED: states.GenerationState.FAILED,
    states.EnvironmentState.STOPPED: states.GenerationState.RETIRED,
}


def spec_of(payload: Json) -> Json:
    """Return the specification in a launch's payload."""
    return {name: value for name, value in payload.items() if name not in OF_UPDATE}


def begin(connection: Connection, environment: Environment) -> int:
    """Write an environment's next generation, with its launch and spec; return the number."""
    name, request_id, spec = environment.name, str(environment.request_id), redact(environment.spec)
    generations = queries.generations(name).run(connection)
    number = generations[0].number + 1 if generations else 1
    created_at, state = environment.created_at, states.GenerationState.STARTING
    new = Generation(name, number, request_id, spec, state, created_at)
    connection.execute(statements.INSERT_GENERATION, GENERATIONS.values(new))
    forget(connection, name, number - KEPT)
    return number


def follow(connection: Connection, environment: Environment, now: float) -> None:
    """Write the state of an environment's generation that follows from the environment's."""
    state = _STATE_OF.get(environment.state)
    if state is not None:
        error = None if environment.error is None else environment.error.message
        move(connection, environment.name, environment.generation, state, now, error)


def move(
    connection: Connection,
    name: str,
    number: int,
    state: states.GenerationState,
    now: float,
    error: str | None = None,
) -> None:
    """Move a generation to a state, unless it has the state, or may no longer change to it."""
    key = {"of_environment": name, "of_number": number}
    if (found := queries.row(connection, statements.GENERATION, key)) is None:
        return
    before = GENERATIONS.read(found)
    if state is states.GenerationState.RETIRED and before.state is states.GenerationState.STARTING:
        # Taken down before it was seen to serve: it was ready, or its launch was cancelled.
        launch = queries.request(before.request_id).run(connection)
        if launch is not None and launch.state is states.RequestState.SUCCEEDED:
            before = replace(before, served_at=now)
        else:
            state, error = states.GenerationState.FAILED, CANCELLED
    explains = state is before.state is states.GenerationState.FAILED and error is not None
    if not explains and state not in states.GENERATION_TRANSITIONS[before.state]:
        return
    is_over = state in (states.GenerationState.RETIRED, states.GenerationState.FAILED)
    after = replace(
        before,
        state=state,
        served_at=now if state is states.GenerationState.SERVING else before.served_at,
        ended_at=now if is_over else None,
        error=error if state is states.GenerationState.FAILED else None,
    )
    given = GENERATIONS.parameters(after, "state", "served_at", "ended_at", "error")
    connection.execute(statements.MOVE_GENERATION, key | given | {"from_state": before.state.value})


def forget(connection: Connection, name: str, up_to_number: int = _EVERY) -> None:
    """Remove the generations of an environment, up to a number if one is given."""
    parameters = {"of_environment": name, "up_to_number": up_to_number}
    connection.execute(statements.DELETE_GENERATIONS, parameters)
