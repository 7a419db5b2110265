# SPDX-License-Identifier: Apache-2.0
"""`AsyncStore`: the queue as the API's event loop sees it.

    loop ──await──▶ writer thread: a whole transaction, several in one commit   group_writer.py
              └───▶ aiosqlite: one query on a read-only connection              reader.py

A read waits for no writer, and sees every write that was acknowledged before it.

Every method may raise `DatabaseError`. Nothing of a transaction that raised has been done.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from .connections.group_writer import GroupWriter
from .connections.reader import Reader
from .records import Environment, Event, NewRequest, Replica, Request, RequestError
from .results import CancelResult, GetResult, SubmitResult
from .sql import queries
from .sql.prepared import prepare
from .sql.queries import Query
from .states import EnvironmentState, RequestState, Schedule
from .transactions import observing, submitting

R = TypeVar("R")


class AsyncStore:
    """Submits, cancels, finds and lists requests; keeps the observed state of environments."""

    def __init__(self, path: Path | str) -> None:
        """Connects to the database in the file `path` when first used."""
        self._writer = GroupWriter(path)
        self._reader = Reader(path)

    async def close(self) -> None:
        """Finish the transactions that wait, and close the connections. Safe to call twice."""
        await self._reader.close()
        await self._writer.close()

    # Requests.

    async def submit(
        self,
        new: NewRequest,
        *,
        environment: Environment | None = None,
        now: float,
        max_pending: int | None = None,
        stopping: str | None = None,
    ) -> SubmitResult:
        """Write a request; it is durable when this returns `Submitted`.

        Args:
            new: the request. Its idempotency key finds the request that has it already.
            environment: takes its name in the same transaction; its row points to the request.
            now: seconds since the epoch.
            max_pending: how many requests of its schedule may wait.
            stopping: the name of an environment that is STOPPING from then on.
        """
        return await self._writer.run(
            submitting.submit, new, environment, now, max_pending, stopping
        )

    async def cancel(self, request_id: str, now: float) -> CancelResult:
        """End a pending request; write down that a running one is to end."""
        return await self._writer.run(submitting.cancel, request_id, now)

    async def get(self, id_or_prefix: str) -> GetResult:
        """The request with this id, or the only one whose id begins so."""
        return await self._read(queries.get(id_or_prefix))

    async def list_requests(
        self,
        states: Collection[RequestState] | None = None,
        operation: str | None = None,
        environment: str | None = None,
        limit: int = 100,
        before_seq: int | None = None,
    ) -> list[Request]:
        """Requests, newest first; those before `before_seq` (a `Request.seq`) for a next page."""
        return await self._read(
            queries.list_requests(states, operation, environment, limit, before_seq)
        )

    async def counts(self) -> dict[str, int]:
        """How many requests are in each state; every state is named."""
        return await self._read(queries.counts())

    async def places(self, schedule: Schedule, limit: int) -> dict[int, int]:
        """How many are ahead of each pending request, by its `seq`; of the first `limit`."""
        return await self._read(queries.places(schedule, limit))

    # Events.

    async def events_after(
        self,
        seq: int,
        *,
        request_id: str | None = None,
        environment: str | None = None,
        limit: int = 1000,
    ) -> list[Event]:
        """The next events after number `seq`, oldest first."""
        return await self._read(queries.events_after(seq, request_id, environment, limit))

    async def last_seq(self) -> int:
        """The number of the last event; 0 before the first."""
        return await self._read(queries.last_seq())

    # Environments and replicas.

    async def environment(self, name: str) -> Environment | None:
        """The environment of this name, ended or not."""
        return await self._read(queries.environment(name))

    async def environments(self, include_stopped: bool = False) -> list[Environment]:
        """Environments by name."""
        return await self._read(queries.environments(include_stopped))

    async def names(self) -> list[str]:
        """The names of environments that are neither failed nor stopped."""
        return await self._read(queries.names())

    async def set_environment_state(
        self,
        name: str,
        to_state: EnvironmentState,
        *,
        address: str | None = None,
        error: RequestError | None = None,
        request_id: str | None = None,
        now: float,
    ) -> Event | None:
        """Move an environment to a state; None when that changes nothing, or is no longer allowed.

        An address or request id of None stays what it was. An error is kept while the state stays
        FAILED, and cleared by any other.
        """
        return await self._writer.run(
            observing.set_environment_state, name, to_state, address, error, request_id, now
        )

    async def upsert_replica(self, replica: Replica, *, now: float) -> Event | None:
        """Write the observed state of a replica; None when it was written before."""
        return await self._writer.run(observing.upsert_replica, replica, now)

    async def replicas(self, environment: str | None = None) -> list[Replica]:
        """The replicas of one environment, or of all, by ordinal."""
        return await self._read(queries.replicas(environment))

    async def delete_replicas(self, environment: str) -> None:
        """Forget the replicas of an environment that has ended."""
        await self._writer.run(observing.delete_replicas, environment)

    async def _read(self, query: Query[R]) -> R:
        statement = prepare(query.statement, tuple(query.parameters))
        rows = await self._reader.rows(statement.text, statement.values(query.parameters))
        return query.result(rows)
