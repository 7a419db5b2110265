# SPDX-License-Identifier: Apache-2.0
"""`WriteConnection`: a connection that writes, and the lock of all that do.

    connection.write(dispatching.claim, schedule, 1, now)      functions of `transactions/`
    connection.read(queries.RUNNING)                         of `sql/queries.py`

The connection is opened when first used and again after an error, for whichever single thread uses
it at the moment. Errors of the driver leave here as ours. Nothing of a transaction that raised has
been done, and the same call may be repeated.

The lock: all connections that write to one file within this process share one `threading.Lock`,
held from BEGIN to COMMIT. Nothing else is locked while it is held, and nothing waits for the event
loop: a transaction is one function that runs on one thread from end to end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from ..sql.queries import Query
from . import sqlite

P = ParamSpec("P")
R = TypeVar("R")


# Weakly held by path, so that a lock goes with the last connection that shares it.
_locks: weakref.WeakValueDictionary[Path, threading.Lock] = weakref.WeakValueDictionary()
_locks_guard = threading.Lock()


class WriteConnection:
    """One connection that writes; any thread may use it, one at a time."""

    def __init__(
        self,
        path: Path | str,
        busy_timeout_seconds: float = sqlite.BUSY_TIMEOUT_SECONDS,
        *,
        syncs: bool = False,
    ) -> None:
        """Connects when first used.

        Args:
            path: the database's file.
            busy_timeout_seconds: how long to wait for another process that writes.
            syncs: each commit survives a power cut, and waits for the disk.
        """
        self._path = Path(path).resolve()
        self._engine = sqlite.create_engine(self._path, busy_timeout_seconds, syncs=syncs)
        with _locks_guard:
            self._lock = _locks.setdefault(self._path, threading.Lock())
        self._connection: Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All or nothing: committed at the end of the block, rolled back when it raises.

        Raises:
            DatabaseError: SQLite refused; the next transaction opens another connection.
        """
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                with self._connection.begin():
                    yield self._connection
            except (DBAPIError, *sqlite.DRIVER_ERRORS) as exc:
                self._drop()  # what an error leaves of a connection is not worth guessing
                orig = exc.orig if isinstance(exc, DBAPIError) else exc
                raise sqlite.error_of(orig, self._path) from exc

    def write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work` in a transaction, and return what it returns. Blocks.

        Raises:
            DatabaseError: SQLite refused.
        """
        with self.transaction() as connection:
            return work(connection, *args, **kwargs)

    def read(self, query: Query[R]) -> R:
        """The query's answer. Blocks."""
        return self.write(query.run)

    def close(self) -> None:
        """Close the connection; the next transaction would open another."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.close()
