# SPDX-License-Identifier: Apache-2.0
"""`AsyncStore`: the queue as the API's event loop sees it.

    loop ──await write──▶ one thread: one transaction, from BEGIN to COMMIT ──▶ back to the loop
              └───read──▶ aiosqlite: one query on a read-only connection             connections.py

    await store.write(submitting.submit, new, now=now)      functions of `transactions/`
    await store.read(queries.environment(name))             of `sql/queries.py`

A read waits for no writer, and sees every write that was acknowledged before it.

A write crosses to the thread once, with a whole transaction. An asynchronous driver would cross for
every statement, and hold SQLite's write lock across each crossing, that is for as long as the loop
is busy with something else; the dispatcher would wait for the loop.

Writes that arrive while the thread is busy share its next transaction (group commit), one after
another in the order of arrival; if one of them raises, the transaction is rolled back and each call
is repeated alone, so that no call fails because of another. An answer is given only after the
commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from .connections import Reader, WriteConnection
from .sql.queries import Query, prepare

MAX_GROUP = 64  # calls per transaction: the dispatcher's writes wait for no more of them

P = ParamSpec("P")
R = TypeVar("R")


_Call = tuple[Callable[[Connection], Any], asyncio.Future[Any]]  # a transaction, and its answer


class AsyncStore:
    """Submits, cancels, finds and lists requests; keeps the observed state of environments."""

    def __init__(self, path: Path | str, *, syncs: bool = False) -> None:
        """Connects to the file `path` when first used; `syncs` as of a `WriteConnection`."""
        self._reader = Reader(path)
        self._connection = WriteConnection(path, syncs=syncs)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="requests-db-writer")
        # Starts the thread now: the pool would keep a call whose thread cannot be started, and
        # run it with a later one, after it was refused.
        self._thread.submit(int)
        self._waiting: deque[_Call] = deque()
        self._performing: asyncio.Future[list[Any]] | None = None

    async def read(self, query: Query[R]) -> R:
        """The query's answer."""
        statement = prepare(query.statement, tuple(query.parameters))
        rows = await self._reader.rows(statement.text, statement.values(query.parameters))
        return query.result(rows)

    async def write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work` in a transaction; what it wrote is durable when this returns.

        Raises `DatabaseError`: nothing of the transaction has been done.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._waiting.append((lambda connection: work(connection, *args, **kwargs), answer))
        if self._performing is None:
            self._perform_next(loop)
        return await answer

    async def close(self) -> None:
        """Finish the calls that wait, then close the connections; safe to call twice."""
        await self._reader.close()
        while self._performing is not None:
            await asyncio.wait([self._performing])
        await asyncio.to_thread(self._thread.shutdown)
        self._connection.close()

    def _perform_next(self, loop: asyncio.AbstractEventLoop) -> None:
        group = [self._waiting.popleft() for _ in range(min(MAX_GROUP, len(self._waiting)))]
        if not group:
            self._performing = None
            return
        self._performing = loop.run_in_executor(self._thread, self._perform, group)
        self._performing.add_done_callback(lambda done: self._deliver(group, done.result(), loop))

    def _deliver(
        self, group: list[_Call], answers: list[Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._perform_next(loop)  # first: the thread works while the answers are delivered
        for (_, future), answer in zip(group, answers, strict=True):
            if future.cancelled():
                continue  # its client has gone; the transaction is committed all the same
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _perform(self, group: list[_Call]) -> list[Any]:
        """On the thread: the answer, or the exception, of each call."""
        if len(group) > 1:
            with suppress(Exception), self._connection.transaction() as connection:
                return [work(connection) for work, _ in group]
            # One of them raised, so the transaction was rolled back: each is run alone.
        answers: list[Any] = []
        for work, _ in group:
            try:
                answers.append(self._connection.write(work))
            except Exception as exc:  # also of the commit
                answers.append(exc)
        return answers
