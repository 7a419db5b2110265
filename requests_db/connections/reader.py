# SPDX-License-Identifier: Apache-2.0
"""`Reader`: an event loop's queries, on `aiosqlite` with one read-only connection.

    loop ──await──▶ aiosqlite's thread ──▶ one statement, its rows fetched ──▶ back to the loop

A query is one statement outside any transaction, so it crosses to the thread once, sees every
commit that was acknowledged before it, waits for no writer (WAL), and leaves no snapshot open that
would hold up a checkpoint. SQLAlchemy builds and compiles the statements (`sql/`); its asynchronous
engine is not used: `docs/decisions/0010-aiosqlite-readers.md` has the figures.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiosqlite

from . import sqlite


class Reader:
    """One connection that only reads, opened when first used and again after an error."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).resolve()
        self._connection: aiosqlite.Connection | None = None
        self._thread: threading.Thread | None = None
        self._opening = asyncio.Lock()

    async def rows(self, text: str, values: Iterable[Any]) -> list[Any]:
        """The rows of one SELECT, each a tuple.

        Raises:
            DatabaseError: SQLite refused; the next query opens another connection.
        """
        try:
            connection = self._connection or await self._open()
            return list(await connection.execute_fetchall(text, values))
        except sqlite.DRIVER_ERRORS as exc:
            await self.close()
            raise sqlite.error_of(exc, self._path) from exc

    async def close(self) -> None:
        """Answer the queries that wait, then close; the next query would open it again."""
        async with self._opening:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()
                self._join()

    async def _open(self) -> aiosqlite.Connection:
        async with self._opening:
            if self._connection is None:
                connection = aiosqlite.Connection(self._connect, iter_chunk_size=64)
                # As SQLAlchemy's dialect does: a store that is never closed must not keep the
                # process from exiting.
                connection._thread.daemon = True  # noqa: SLF001
                try:
                    self._connection = await connection
                except sqlite.DRIVER_ERRORS:
                    self._join()
                    raise
            return self._connection

    def _join(self) -> None:
        """Wait for the thread, which has answered and is at its last instruction."""
        if self._thread is not None:
            self._thread.join()

    def _connect(self) -> sqlite3.Connection:
        """On aiosqlite's thread."""
        self._thread = threading.current_thread()
        self._thread.name = "requests-db-reader"
        return sqlite.connect_read_only(self._path)
