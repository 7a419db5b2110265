# SPDX-License-Identifier: Apache-2.0
"""`AsyncStore`: the queue as the API's event loop sees it.

    loop ──await──▶ writer thread ──▶ one transaction, from BEGIN to COMMIT ──▶ back to the loop
              └───▶ reader thread ──▶ one query (never waits for a writer: WAL)

A call crosses to its thread once, with a whole transaction. An asynchronous driver would cross
for every statement, and hold SQLite's write lock across each crossing, that is for as long as the
loop is busy with something else; the dispatcher would wait for the loop.

Calls that arrive while a lane is busy share its next transaction (group commit), one after another
in the order of arrival, those of a `patient` store after the others; if one of them raises, it is
undone and each is repeated alone, so that nobody pays for another's failure. An answer is given
only after the commit.

Raises, everywhere: `DatabaseError`. Nothing of a transaction that raised has been done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from .connections.link import Link
from .records import Environment, Event, NewRequest, Replica, Request, RequestError
from .results import CancelResult, GetResult, SubmitResult
from .sql import queries
from .states import EnvironmentState, RequestState, Schedule
from .transactions import observing, submitting

MAX_GROUP = 64  # calls per transaction: the dispatcher wants its turn too
MAX_PATIENT = 8  # of them, from those whose turn is not urgent

P = ParamSpec("P")
R = TypeVar("R")


class AsyncStore:
    """Submits, cancels, finds, lists, and keeps what is observed."""

    def __init__(self, where: Path | str, lanes: tuple[_Lane, _Lane] | None = None) -> None:
        """`where` is the database's file, or its address. Connects when first used."""
        self._where = where
        self._write, self._read = lanes or (
            _Lane(where, "requests-db-writer", writes=True),
            _Lane(where, "requests-db-reader", writes=False),
        )

    def patient(self) -> AsyncStore:
        """The same store, for work that nobody sits and waits for: others pass its calls.

        It goes on all the same: every transaction takes some of its calls along. Close the store
        that it was made from.
        """
        return AsyncStore(self._where, (_PatientLane(self._write), _PatientLane(self._read)))

    async def close(self) -> None:
        """Finish what has begun, and let go of the file."""
        await self._read.close()
        await self._write.close()

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

        With `environment`, its name is taken in the same transaction, and the row points to the
        new request; the environment that `stopping` names is STOPPING from then on. The same
        idempotency key finds the request that has it already.
        """
        return await self._write.run(
            submitting.submit, new, environment, now, max_pending, stopping
        )

    async def cancel(self, request_id: str, now: float) -> CancelResult:
        """End a pending request; write down that a running one is to end."""
        return await self._write.run(submitting.cancel, request_id, now)

    async def get(self, id_or_prefix: str) -> GetResult:
        """The request with this id, or the only one whose id begins so."""
        return await self._read.run(queries.get, id_or_prefix)

    async def list_requests(
        self,
        states: Collection[RequestState] | None = None,
        operation: str | None = None,
        environment: str | None = None,
        limit: int = 100,
        before_seq: int | None = None,
    ) -> list[Request]:
        """Requests, newest first; those before `before_seq` (a `Request.seq`) for a next page."""
        return await self._read.run(
            queries.list_requests, states, operation, environment, limit, before_seq
        )

    async def counts(self) -> dict[str, int]:
        """How many requests stand in each state; every state is named."""
        return await self._read.run(queries.counts)

    async def places(self, schedule: Schedule, limit: int) -> dict[int, int]:
        """How many are ahead of each pending request, by its `seq`; of the first `limit`."""
        return await self._read.run(queries.places, schedule, limit)

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
        return await self._read.run(queries.events_after, seq, request_id, environment, limit)

    async def last_seq(self) -> int:
        """The number of the last event; 0 before the first."""
        return await self._read.run(queries.last_seq)

    # Environments and replicas.

    async def environment(self, name: str) -> Environment | None:
        """The environment of this name, ended or not."""
        return await self._read.run(queries.environment, name)

    async def environments(self, include_stopped: bool = False) -> list[Environment]:
        """Environments by name."""
        return await self._read.run(queries.environments, include_stopped)

    async def names(self) -> list[str]:
        """The names of environments that are there, or come up: none that failed or was stopped."""
        return await self._read.run(queries.names)

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
        """Move an environment on; None when that changes nothing, or does not follow any more.

        An address or request id of None stays what it was. An error is kept while the state stays
        FAILED, and cleared by any other.
        """
        return await self._write.run(
            observing.set_environment_state, name, to_state, address, error, request_id, now
        )

    async def upsert_replica(self, replica: Replica, *, now: float) -> Event | None:
        """Write how a replica is; None when that is known."""
        return await self._write.run(observing.upsert_replica, replica, now)

    async def replicas(self, environment: str | None = None) -> list[Replica]:
        """The replicas of one environment, or of all, by ordinal."""
        return await self._read.run(queries.replicas, environment)

    async def delete_replicas(self, environment: str) -> None:
        """Forget the replicas of an environment that has ended."""
        await self._write.run(observing.delete_replicas, environment)


@dataclass(frozen=True, slots=True)
class _Call:
    """One transaction's work, and who waits for it."""

    work: Callable[[Connection], Any]
    future: asyncio.Future[Any]


class _Lane:
    """One thread with one connection. What the thread runs says so; the rest is the loop's."""

    def __init__(self, where: Path | str, name: str, *, writes: bool) -> None:
        self._link = Link(where, writes=writes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: deque[_Call] = deque()
        self._patient: deque[_Call] = deque()
        self._performing: asyncio.Future[list[Any]] | None = None

    async def run(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """What `work` returns, given a connection in a transaction."""
        return await self._queue(self._waiting, work, *args, **kwargs)

    async def run_patiently(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The same, letting others pass."""
        return await self._queue(self._patient, work, *args, **kwargs)

    async def _queue(
        self,
        queue: deque[_Call],
        work: Callable[Concatenate[Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        loop = asyncio.get_running_loop()
        call = _Call(lambda connection: work(connection, *args, **kwargs), loop.create_future())
        queue.append(call)
        if self._performing is None:
            self._perform_next(loop)
        result: R = await call.future
        return result

    async def close(self) -> None:
        """Finish what waits, then let go; safe to call twice."""
        while self._performing is not None:
            await asyncio.wait([self._performing])
        await asyncio.to_thread(self._thread.shutdown)
        self._link.close()

    def _perform_next(self, loop: asyncio.AbstractEventLoop) -> None:
        patient = _take(self._patient, MAX_PATIENT)
        group = _take(self._waiting, MAX_GROUP - len(patient)) + patient
        if not group:
            self._performing = None
            return
        self._performing = loop.run_in_executor(self._thread, self._perform, group)
        self._performing.add_done_callback(lambda done: self._deliver(group, done.result(), loop))

    def _deliver(
        self, group: list[_Call], answers: list[Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._perform_next(loop)  # first: the thread works while the answers go their way
        for call, answer in zip(group, answers, strict=True):
            if call.future.cancelled():
                continue  # its client has gone; what it asked for is done all the same
            if isinstance(answer, Exception):
                call.future.set_exception(answer)
            else:
                call.future.set_result(answer)

    def _perform(self, group: list[_Call]) -> list[Any]:
        """On the thread: the answer, or the exception, of each call."""
        if len(group) > 1:
            with suppress(Exception), self._link.transaction() as connection:
                return [call.work(connection) for call in group]
            # One of them raised, so none has been done: each stands for itself.
        return [self._perform_alone(call) for call in group]

    def _perform_alone(self, call: _Call) -> Any:
        try:
            with self._link.transaction() as connection:
                return call.work(connection)
        except Exception as exc:
            return exc


class _PatientLane(_Lane):
    """A lane as those see it who let others pass."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane

    async def run(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """What `work` returns, after those who are in a hurry."""
        return await self._lane.run_patiently(work, *args, **kwargs)

    async def close(self) -> None:
        """Nothing: the lane is not ours."""


def _take(queue: deque[_Call], most: int) -> list[_Call]:
    return [queue.popleft() for _ in range(min(most, len(queue)))]
