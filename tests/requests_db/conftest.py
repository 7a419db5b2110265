# SPDX-License-Identifier: Apache-2.0
"""A real SQLite file for every test, and the two sides that use it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from openenvd.requests_db import records
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection, open_database
from openenvd.requests_db.sql import queries, statements
from openenvd.requests_db.sql.rows import ENVIRONMENTS
from openenvd.requests_db.transactions import dispatching, observing, retention, submitting
from openenvd.schema.states import EnvironmentState, ErrorKind, RequestState, Schedule

EVERY_ENVIRONMENT = queries.Query(statements.ALL_ENVIRONMENTS, {}, ENVIRONMENTS.read_all)
CREATED_AT, CLAIMED_AT, ENDED_AT = 100.5, 200.5, 300.5
CHECK = records.NewRequest("check", Schedule.SHORT, {})
LAUNCH = records.NewRequest("launch", Schedule.LONG, {"name": "trial"}, environment="trial")
DOWN = records.NewRequest("down", Schedule.SHORT, {"name": "trial"}, environment="trial")


class Queue(WriteConnection):
    """The dispatcher's side, and requests that start *in* a state."""

    def make(
        self, state: RequestState = RequestState.PENDING, *, ended_at: float = ENDED_AT, **more: Any
    ) -> records.Request:
        # More urgent than all others, so that a claim of one takes this one.
        more = {"priority": 0 if state is RequestState.PENDING else 1_000, **more}
        times = {"now": more.pop("now", CREATED_AT), "arrival": more.pop("arrival", None)}
        kind: dict[str, Any] = {"operation": "noop", "schedule": Schedule.SHORT, "payload": {}}
        result = self.write(submitting.submit, records.NewRequest(**{**kind, **more}), **times)
        assert isinstance(result, records.Submitted)
        request = result.request
        if state is not RequestState.PENDING:
            [claimed] = self.claim(1, request.schedule).requests
            assert claimed.id == request.id
        if state.is_final:
            error = records.RequestError(ErrorKind.OPERATION_ERROR, "it broke")
            failed = error if state is RequestState.FAILED else None
            self.end(request.id, state, ended_at, error=failed)
        return request

    def claim(
        self, limit: int = 1, schedule: Schedule = Schedule.SHORT, now: float = CLAIMED_AT
    ) -> records.Claim:
        return self.write(dispatching.claim, schedule, limit, now)

    def claimed(self, limit: int, **more: Any) -> list[str]:
        return [request.id for request in self.claim(limit, **more).requests]

    def record(self, **batch: Any) -> tuple[records.Event, ...]:
        return self.write(dispatching.record, **batch)

    def end(
        self,
        request_id: str,
        state: RequestState = RequestState.SUCCEEDED,
        at: float = ENDED_AT,
        **more: Any,
    ) -> tuple[records.Event, ...]:
        return self.record(outcomes=[records.Outcome(request_id, state, at, **more)])

    def release(self, request: records.Request) -> tuple[records.Event, ...]:
        return self.write(dispatching.release, [request.id], 400.5)

    def cancel(self, request: records.Request, at: float = 250.5) -> None:
        self.write(submitting.cancel, request.id, at)

    def get(self, request_id: str) -> records.Request:
        found = self.read(queries.get(request_id))
        assert isinstance(found, records.Request)
        return found

    def sql(self, statement: str, values: Any = ()) -> Any:
        with self.transaction() as connection:
            done = connection.exec_driver_sql(statement, values)
            return done.scalar() if done.returns_rows else None


def collect(queue: Queue, old_event: int, keep_requests: int) -> list[str]:
    return [id_ for step in retention.collect(queue, old_event, keep_requests) for id_ in step]


def collect_environments(queue: Queue, old_event: int) -> list[str]:
    ages = retention.Ages(queue)
    list(ages.read())
    return [name for step in ages.collect_environments(old_event) for name in step]


class Api(AsyncStore):
    """The API's side, and the reconciler's: what is submitted, and how environments go."""

    async def submit(
        self, new: records.NewRequest = CHECK, *, now: float = CREATED_AT
    ) -> records.Submitted:
        result = await self.offer(new, now=now)
        assert isinstance(result, records.Submitted)
        return result

    async def offer(self, new: records.NewRequest, **more: Any) -> records.SubmitResult:
        return await self.write(submitting.submit, new, **{"now": CREATED_AT, **more})

    async def launch(
        self, environment: records.Environment | None = None, now: float = CREATED_AT, **more: Any
    ) -> records.Request:
        environment = environment or new_environment(now=now)
        new = records.NewRequest("launch", Schedule.LONG, environment.spec, environment.name)
        result = await self.offer(new, environment=environment, now=now, **more)
        assert isinstance(result, records.Submitted)
        return result.request

    async def goes(
        self, state: EnvironmentState, now: float = 200.5, name: str = "trial", **more: Any
    ) -> records.Event | None:
        return await self.write(observing.set_environment_state, name, state, now=now, **more)

    async def environment(self, name: str = "trial") -> records.Environment:
        found = await self.read(queries.environment(name))
        assert found is not None
        return found

    async def generations(self) -> list[records.Generation]:
        return await self.read(queries.generations("trial"))

    async def put(self, replica: records.Replica, now: float = CREATED_AT) -> records.Event | None:
        return await self.write(observing.upsert_replica, replica, now=now)

    async def sql(self, statement: str, values: Any = ()) -> None:
        await self.write(Connection.exec_driver_sql, statement, values)


def new_environment(
    name: str = "trial", now: float = CREATED_AT, **spec: Any
) -> records.Environment:
    return records.Environment(name, spec or {"source": "echo"}, EnvironmentState.PENDING, now, now)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "requests.db"
    open_database(file)
    return file


@pytest.fixture
def queue(path: Path) -> Iterator[Queue]:
    made = Queue(path)
    yield made
    made.close()


@pytest.fixture
async def api(path: Path) -> AsyncIterator[Api]:
    made = Api(path)
    yield made
    await made.close()
