# SPDX-License-Identifier: Apache-2.0
"""The table of transitions, the guards in the SQL and the constraints of the tables agree."""

from enum import StrEnum
from itertools import product
from typing import Any

import pytest
from sqlalchemy import Table, insert, update

from openenvd.requests_db.errors import DatabaseError
from openenvd.requests_db.sql.rows import ENVIRONMENTS
from openenvd.requests_db.sql.tables import environments, replicas, requests
from openenvd.requests_db.transactions import observing
from openenvd.schema.states import (
    ENVIRONMENT_TRANSITIONS,
    REQUEST_TRANSITIONS,
    EnvironmentState,
    InvalidTransition,
    ReplicaState,
    RequestState,
    check_transition,
)

from .conftest import Queue, new_environment

R = RequestState
PAIRS = list(product(RequestState, RequestState))
NAMES = [f"{before}-{after}" for before, after in PAIRS]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=NAMES)
def test_the_sql_and_the_check_move_a_request_where_the_table_allows(
    queue: Queue, before: RequestState, after: RequestState
) -> None:
    request = queue.make(before)
    if after is R.PENDING:
        queue.release(request)
    elif after is R.RUNNING:
        queue.claim(10)
    else:
        queue.end(request.id, after)
        if after is R.CANCELLED and before is R.PENDING:
            queue.cancel(request)
    moves = before is not after and after in REQUEST_TRANSITIONS[before]
    assert queue.get(request.id).state is (after if moves else before)
    if after in REQUEST_TRANSITIONS[before]:
        check_transition("7f3a", before, after)
        return
    with pytest.raises(InvalidTransition, match=f"7f3a cannot go from {before} to {after}"):
        check_transition("7f3a", before, after)


def test_a_final_state_never_changes() -> None:
    for state in RequestState:
        assert state.is_final == (not REQUEST_TRANSITIONS[state])


def change(queue: Queue, request_id: str, **values: Any) -> None:
    with queue.transaction() as connection:
        connection.execute(update(requests).where(requests.c.id == request_id).values(**values))


@pytest.mark.parametrize(
    ("state", "values", "constraint"),
    [
        (R.PENDING, {"state": "LIMBO", "attempts": 1, "started_at": 1.5}, "state"),
        *((state, {"finished_at": None if state.is_final else 2.5}, "finished_at") for state in R),
        (R.SUCCEEDED, {"error": "{}"}, "error"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused_by_the_table(
    queue: Queue, state: R, values: dict[str, Any], constraint: str
) -> None:
    request = queue.make(state)
    with pytest.raises(DatabaseError, match=f"ck_requests_{constraint}"):
        change(queue, request.id, **values)


@pytest.mark.parametrize(("before", "after"), list(product(EnvironmentState, EnvironmentState)))
def test_an_environment_moves_exactly_where_the_table_allows(
    queue: Queue, before: EnvironmentState, after: EnvironmentState
) -> None:
    values = ENVIRONMENTS.values(new_environment()) | {"state": before.value}
    with queue.transaction() as connection:
        connection.execute(insert(environments).values(values))
    event = queue.write(observing.set_environment_state, "trial", after, now=400.5)
    allowed = after in ENVIRONMENT_TRANSITIONS[before]
    assert queue.sql("SELECT state FROM environments") == (after if allowed else before)
    assert (event is not None) == allowed


REPLICA = dict.fromkeys(("environment", "provider", "run_dir"), "x")


@pytest.mark.parametrize(
    ("table", "states", "key", "row"),
    [
        (environments, EnvironmentState, "name", ENVIRONMENTS.values(new_environment())),
        (replicas, ReplicaState, "id", {**REPLICA, "ordinal": 0, "restarts": 0, "started_at": 1.5}),
    ],
    ids=["environments", "replicas"],
)
def test_environments_and_replicas_take_the_enum_states_alone(
    queue: Queue, table: Table, states: type[StrEnum], key: str, row: dict[str, Any]
) -> None:
    with queue.transaction() as connection:
        for state in states:
            connection.execute(insert(table).values({**row, key: state, "state": state}))
    with pytest.raises(DatabaseError, match="_state"), queue.transaction() as connection:
        connection.execute(insert(table).values({**row, key: "x", "state": "LIMBO"}))
