# SPDX-License-Identifier: Apache-2.0
"""A real SQLite file for every test, and requests that start in a given state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.migrate import open_database
from openenvd.requests_db.records import (
    Environment,
    NewRequest,
    Outcome,
    Request,
    RequestError,
)
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.states import EnvironmentState, ErrorKind, RequestState, Schedule

MakeRequest = Callable[..., Request]
MakeEnvironment = Callable[..., Environment]

CREATED_AT = 100.5
CLAIMED_AT = 200.5
ENDED_AT = 300.5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of an empty, up-to-date database."""
    file = tmp_path / "requests.db"
    open_database(file)
    return file


@pytest.fixture
def writer(path: Path) -> Iterator[WriteConnection]:
    """A connection of the test's own."""
    writer = WriteConnection(path)
    yield writer
    writer.close()


@pytest.fixture
def dispatch(path: Path) -> Iterator[WriteConnection]:
    """The dispatcher's side."""
    store = WriteConnection(path)
    yield store
    store.close()


@pytest.fixture
async def store(path: Path) -> AsyncIterator[AsyncStore]:
    """The API's side."""
    store = AsyncStore(path)
    yield store
    await store.close()


@pytest.fixture
def make_request(writer: WriteConnection, dispatch: WriteConnection) -> MakeRequest:
    """A factory of requests that start *in* a state."""

    def submit(
        operation: str = "noop",
        now: float = CREATED_AT,
        arrival: float | None = None,
        **fields: Any,
    ) -> Request:
        new = NewRequest(
            operation,
            fields.pop("schedule", Schedule.SHORT),
            fields.pop("payload", {}),
            **fields,
        )
        with writer.transaction() as connection:
            result = submitting.submit(connection, new, now=now, arrival=arrival)
        assert isinstance(result, Submitted)
        return result.request

    def make(
        state: RequestState = RequestState.PENDING, *, ended_at: float = ENDED_AT, **fields: Any
    ) -> Request:
        # More urgent than all others, so that a claim of one takes this one.
        priority = fields.pop("priority", 0 if state is RequestState.PENDING else 1_000)
        request = submit(priority=priority, **fields)
        if state is RequestState.PENDING:
            return request
        [claimed] = dispatch.write(dispatching.claim, request.schedule, 1, CLAIMED_AT).requests
        assert claimed.id == request.id
        if state.is_final:
            error = RequestError(ErrorKind.OPERATION_ERROR, "it broke")
            failed = error if state is RequestState.FAILED else None
            dispatch.write(
                dispatching.record, outcomes=[Outcome(request.id, state, ended_at, error=failed)]
            )
        return request

    return make


@pytest.fixture
def make_environment() -> MakeEnvironment:
    """A factory of environments as a launch hands them in."""

    def make(name: str = "trial", now: float = CREATED_AT) -> Environment:
        return Environment(name, {"source": "echo"}, EnvironmentState.PENDING, now, now)

    return make
