# SPDX-License-Identifier: Apache-2.0
"""Writes the history of environments, a generation for each launch: functions over a connection.

    begin      a launch was submitted: STARTING
    follow     its environment's state has changed: SERVING when it is ready, RETIRED when it was
               taken down, FAILED with the environment's error

Each is part of the transaction that writes what it follows from, so that the two never differ.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection

from ...schema.states import GENERATION_TRANSITIONS, EnvironmentState, GenerationState, RequestState
from ...system.text.hidden_values import redact
from ...system.text.json_lines import Json
from ..records import Environment, Generation
from ..sql import statements
from ..sql.rows import GENERATIONS, REQUESTS

KEPT = 20  # of each environment: the newest
_EVERY = 2**31  # beyond every number
CANCELLED = "it was cancelled before it was ready"

# Of a launch's payload, what says how it is to take its name, and not what is launched.
OF_UPDATE = frozenset({"update", "replaces", "drain_timeout_seconds"})

_STATE_OF = {
    EnvironmentState.READY: GenerationState.SERVING,
    EnvironmentState.DEGRADED: GenerationState.SERVING,
    EnvironmentState.ASLEEP: GenerationState.SERVING,
    EnvironmentState.FAILED: GenerationState.FAILED,
    EnvironmentState.STOPPED: GenerationState.RETIRED,
}


def spec_of(payload: Json) -> Json:
    """What a launch's payload says is to run."""
    return {name: value for name, value in payload.items() if name not in OF_UPDATE}


def begin(connection: Connection, environment: Environment, now: float) -> int:
    """Write the next generation of an environment, of this launch and spec; its number."""
    name, request_id, spec = environment.name, str(environment.request_id), environment.spec
    found = connection.execute(statements.GENERATIONS_OF, {"of_environment": name}).first()
    number = 1 if found is None else GENERATIONS.read(found).number + 1
    new = Generation(name, number, request_id, redact(spec), GenerationState.STARTING, now)
    connection.execute(statements.INSERT_GENERATION, GENERATIONS.values(new))
    forget(connection, name, number - KEPT)
    return number


def follow(connection: Connection, environment: Environment, now: float) -> None:
    """Write what the state of an environment makes of its generation."""
    state = _STATE_OF.get(environment.state)
    if state is not None:
        error = None if environment.error is None else environment.error.message
        move(connection, environment.name, environment.generation, state, now, error)


def move(
    connection: Connection,
    name: str,
    number: int,
    state: GenerationState,
    now: float,
    error: str | None = None,
) -> None:
    """Move a generation to a state; nothing when it is there, or may no longer go there."""
    key = {"of_environment": name, "of_number": number}
    found = connection.execute(statements.GENERATION, key).one_or_none()
    if found is None:
        return
    before = GENERATIONS.read(found)
    if state is GenerationState.RETIRED and before.state is GenerationState.STARTING:
        # Taken down before it was seen to serve: it was ready, or its launch was called off.
        if _has_succeeded(connection, before.request_id):
            before = replace(before, served_at=now)
        else:
            state, error = GenerationState.FAILED, CANCELLED
    explains = state is before.state is GenerationState.FAILED and error is not None
    if not explains and state not in GENERATION_TRANSITIONS[before.state]:
        return
    is_over = state in (GenerationState.RETIRED, GenerationState.FAILED)
    after = replace(
        before,
        state=state,
        served_at=now if state is GenerationState.SERVING else before.served_at,
        ended_at=now if is_over else None,
        error=error if state is GenerationState.FAILED else None,
    )
    values = GENERATIONS.values(after)
    given = {
        f"to_{column}": values[column] for column in ("state", "served_at", "ended_at", "error")
    }
    connection.execute(statements.MOVE_GENERATION, key | given | {"from_state": before.state.value})


def _has_succeeded(connection: Connection, request_id: str) -> bool:
    found = connection.execute(statements.REQUEST_BY_ID, {"of_id": request_id}).one_or_none()
    return found is not None and REQUESTS.read(found).state is RequestState.SUCCEEDED


def forget(connection: Connection, name: str, up_to_number: int = _EVERY) -> None:
    """Remove the generations of an environment, up to a number if one is given."""
    parameters = {"of_environment": name, "up_to_number": up_to_number}
    connection.execute(statements.DELETE_GENERATIONS, parameters)
