# SPDX-License-Identifier: Apache-2.0
"""The table of transitions, the guards in the SQL and the constraints of the tables agree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from sqlalchemy import insert, select, update

from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.errors import DatabaseError
from openenvd.requests_db.records import Environment, Outcome, Request
from openenvd.requests_db.sql.rows import ENVIRONMENTS
from openenvd.requests_db.sql.tables import environments, replicas, requests
from openenvd.requests_db.transactions import dispatching, observing, submitting
from openenvd.schema.states import (
    ENVIRONMENT_TRANSITIONS,
    REQUEST_TRANSITIONS,
    EnvironmentState,
    InvalidTransition,
    ReplicaState,
    RequestState,
    Schedule,
    check_transition,
)

PAIRS = list(product(RequestState, RequestState))
NAMES = [f"{before}-{after}" for before, after in PAIRS]


def state_of(writer: WriteConnection, request_id: str) -> RequestState:
    with writer.transaction() as connection:
        query = select(requests.c.state).where(requests.c.id == request_id)
        return RequestState(connection.execute(query).scalar_one())


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=NAMES)
def test_the_sql_moves_a_request_exactly_where_the_table_allows(
    before: RequestState,
    after: RequestState,
    make_request: Callable[..., Request],
    dispatch: WriteConnection,
    writer: WriteConnection,
) -> None:
    request = make_request(before)
    if after is RequestState.PENDING:
        dispatch.write(dispatching.release, [request.id], 400.5)
    elif after is RequestState.RUNNING:
        dispatch.write(dispatching.claim, Schedule.SHORT, 10, 400.5)
    else:
        dispatch.write(dispatching.record, outcomes=[Outcome(request.id, after, 400.5)])
        if after is RequestState.CANCELLED and before is RequestState.PENDING:
            with writer.transaction() as connection:
                submitting.cancel(connection, request.id, 400.5)
    moves = before is not after and after in REQUEST_TRANSITIONS[before]
    assert state_of(writer, request.id) is (after if moves else before)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=NAMES)
def test_check_transition_refuses_unlisted_transitions(
    before: RequestState, after: RequestState
) -> None:
    if after in REQUEST_TRANSITIONS[before]:
        check_transition("7f3a", before, after)
        return
    with pytest.raises(InvalidTransition, match=f"7f3a cannot go from {before} to {after}"):
        check_transition("7f3a", before, after)


def test_a_final_state_never_changes() -> None:
    for state in RequestState:
        assert state.is_final == (not REQUEST_TRANSITIONS[state])


@pytest.mark.parametrize("state", [*RequestState, "LIMBO"])
def test_the_table_of_requests_takes_the_enum_states_and_no_other(
    state: str, make_request: Callable[..., Request], writer: WriteConnection
) -> None:
    request = make_request()
    final = state in [s for s in RequestState if s.is_final]
    values = {"state": state, "attempts": 1, "started_at": 1.5}
    values["finished_at"] = 2.5 if final else None
    change = update(requests).where(requests.c.id == request.id).values(values)
    if state in list(RequestState):
        with writer.transaction() as connection:
            connection.execute(change)
        assert state_of(writer, request.id) == state
    else:
        with pytest.raises(DatabaseError, match="ck_requests_state"), writer.transaction() as c:
            c.execute(change)


@pytest.mark.parametrize("state", list(RequestState))
def test_only_a_final_request_has_finished_at(
    state: RequestState, make_request: Callable[..., Request], writer: WriteConnection
) -> None:
    request = make_request(state)
    wrong = None if state.is_final else 2.5
    change = update(requests).where(requests.c.id == request.id).values(finished_at=wrong)
    with pytest.raises(DatabaseError, match="ck_requests_finished_at"), writer.transaction() as c:
        c.execute(change)


def test_only_a_failed_request_has_an_error(
    make_request: Callable[..., Request], writer: WriteConnection
) -> None:
    request = make_request(RequestState.SUCCEEDED)
    change = update(requests).where(requests.c.id == request.id).values(error="{}")
    with pytest.raises(DatabaseError, match="ck_requests_error"), writer.transaction() as c:
        c.execute(change)


@pytest.mark.parametrize(
    ("before", "after"),
    list(product(EnvironmentState, EnvironmentState)),
)
def test_an_environment_moves_exactly_where_the_table_allows(
    before: EnvironmentState,
    after: EnvironmentState,
    writer: WriteConnection,
    make_environment: Callable[..., Environment],
) -> None:
    values = ENVIRONMENTS.values(make_environment("trial")) | {"state": before.value}
    with writer.transaction() as connection:
        connection.execute(insert(environments).values(values))
        event = observing.set_environment_state(connection, "trial", after, now=400.5)
        found = connection.execute(select(environments.c.state)).scalar_one()
    allowed = after in ENVIRONMENT_TRANSITIONS[before]
    assert found == (after if allowed else before)
    assert (event is not None) == allowed


@pytest.mark.parametrize("table", [environments, replicas], ids=lambda table: table.name)
def test_environments_and_replicas_take_the_enum_states_alone(
    table: object, writer: WriteConnection, make_environment: Callable[..., Environment]
) -> None:
    if table is environments:
        states: list[str] = list(EnvironmentState)
        row = ENVIRONMENTS.values(make_environment())
        key = "name"
    else:
        states = list(ReplicaState)
        row = dict.fromkeys(("id", "environment", "provider", "run_dir"), "x")
        row |= {"ordinal": 0, "restarts": 0, "started_at": 1.5}
        key = "id"
    target = environments if table is environments else replicas
    with writer.transaction() as connection:
        for state in states:
            connection.execute(insert(target).values({**row, key: state, "state": state}))
    with pytest.raises(DatabaseError, match="_state"), writer.transaction() as connection:
        connection.execute(insert(target).values({**row, key: "x", "state": "LIMBO"}))
