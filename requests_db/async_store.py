# SPDX-License-Identifier: Apache-2.0
"""`AsyncStore`: the queue as the API's event loop sees it.

    loop ──await write──▶ writer thread: a whole transaction, several in one commit  group_writer.py
              └───read──▶ aiosqlite: one query on a read-only connection             reader.py

    await store.write(submitting.submit, new, now=now)      functions of `transactions/`
    await store.read(queries.environment(name))             of `sql/queries.py`

A read waits for no writer, and sees every write that was acknowledged before it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from .connections.group_writer import GroupWriter
from .connections.reader import Reader
from .sql.prepared import prepare
from .sql.queries import Query

P = ParamSpec("P")
R = TypeVar("R")


class AsyncStore:
    """Submits, cancels, finds and lists requests; keeps the observed state of environments."""

    def __init__(self, path: Path | str, *, syncs: bool = False) -> None:
        """Connects to the database in the file `path` when first used.

        With `syncs`, what is written survives a power cut too.
        """
        self._writer = GroupWriter(path, syncs=syncs)
        self._reader = Reader(path)

    async def close(self) -> None:
        """Finish the transactions that wait, and close the connections. Safe to call twice."""
        await self._reader.close()
        await self._writer.close()

    async def write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work` in a transaction; what it wrote is durable when this returns.

        Raises:
            DatabaseError: nothing of the transaction has been done.
        """
        return await self._writer.run(work, *args, **kwargs)

    async def read(self, query: Query[R]) -> R:
        """The query's answer.

        Raises:
            DatabaseError: SQLite refused.
        """
        statement = prepare(query.statement, tuple(query.parameters))
        rows = await self._reader.rows(statement.text, statement.values(query.parameters))
        return query.result(rows)
