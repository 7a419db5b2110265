# SPDX-License-Identifier: Apache-2.0
"""Connections that live as long as their store, and whose turn it is to write.

A `Link` is one connection, opened when first needed and again after an error, for whichever single
thread uses it at the moment. Errors of the driver leave here as ours.

The lock: all links that write to one database within this process share one `threading.Lock`, held
from BEGIN to COMMIT. Nothing else is locked while it is held, and nothing waits for the event
loop: a transaction is one function that runs on one thread from end to end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError

from . import sqlite
from .checkpoints import Checkpointer


class _Turn:
    """The right to write; weakly held by address, so that it goes with the last link."""

    def __init__(self, url: URL) -> None:
        self.lock = threading.Lock()
        self.checkpointer = Checkpointer(url)
        self.writers = 0  # links that are open


_turns: weakref.WeakValueDictionary[str, _Turn] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


def _turn_of(url: URL) -> _Turn:
    key = str(Path(url.database).resolve()) if url.database else str(url)
    with _turns_lock:
        return _turns.setdefault(key, _Turn(url))


class Link:
    """One connection that writes, or one that only reads."""

    def __init__(self, where: Path | str, *, writes: bool) -> None:
        self._url = sqlite.database_url(where)
        self._engine = sqlite.create_engine(self._url, writes=writes)
        self._turn = _turn_of(self._url) if writes else _Turn(self._url)
        self._writes = writes
        self._connection: Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All or nothing: committed at the end of the block, rolled back when it raises.

        Raises:
            DatabaseError
        """
        with self._turn.lock:
            try:
                connection = self._open()
                with connection.begin():
                    yield connection
                if self._writes:
                    self._turn.checkpointer.committed()
            except (DBAPIError, *sqlite.DRIVER_ERRORS) as exc:
                self._drop()  # what an error leaves of a connection is not worth guessing
                orig = exc.orig if isinstance(exc, DBAPIError) else exc
                raise sqlite.error_of(orig, self._url) from exc

    def close(self) -> None:
        """Close the connection; the next transaction would open another."""
        with self._turn.lock:
            self._drop()
            if self._turn.writers == 0:
                self._turn.checkpointer.close()

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
            self._turn.writers += 1
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._turn.writers -= 1
            with suppress(DBAPIError):
                connection.close()
