# SPDX-License-Identifier: Apache-2.0
"""Opens and sets up SQLite, and explains its errors.

Durability. The log is written ahead (WAL) with `synchronous=NORMAL`: a commit has handed its
pages to the kernel when it returns. An acknowledged write survives `kill -9`, but a power cut may
lose the last commits; with `syncs`, each commit waits until they are on the disk:
`docs/decisions/0013-durable-against-a-killed-process.md`.

Locking. SQLite lets one connection write at a time, and lets the others *poll* for their turn with
sleeps of up to 100 ms. Writers inside the daemon therefore take turns by a lock of our own
(`WriteConnection`), and `BEGIN IMMEDIATE` claims SQLite's before anything is read, so that no
transaction fails half way because another wrote first. The busy time-out is for other processes.
Connections that read are opened `mode=ro`: they can neither take the write lock nor create a file.

`Reader`: an event loop's queries, on `aiosqlite` with one read-only connection.

    loop ──await──▶ aiosqlite's thread ──▶ one statement, its rows fetched ──▶ back to the loop

A query is one statement outside any transaction, so it crosses to the thread once, sees every
commit that was acknowledged before it, waits for no writer (WAL), and leaves no snapshot open that
would hold up a checkpoint. SQLAlchemy builds and compiles the statements (`sql/`); its asynchronous
engine is not used: `docs/decisions/0010-aiosqlite-readers.md` has the figures.

`WriteConnection` is opened when it is first used and again after an error; one thread uses it at a
time. Errors of the driver are raised as ours. A transaction that raised has changed nothing, and
the same call may be repeated. All that write to one file within this process share one
`threading.Lock`, held from BEGIN to COMMIT. Nothing else is locked while it is held, and nothing
waits for the event loop: a transaction is one function that runs on one thread from end to end.

`open_database`: makes a database at this code's version (SQLite's `user_version`) of what is there.

    nothing there            the tables as they are today
    at this version          nothing to do (two queries)
    at an earlier one        the migrations since then
    at a later one           DatabaseTooNew: a newer openenvd wrote it
    something else           DatabaseCorrupt

First, damaged pages are looked for. All is one transaction: a daemon killed in the middle leaves
what was there before.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import aiosqlite
from sqlalchemy import URL, Connection, Engine, event, insert, inspect
from sqlalchemy import create_engine as _create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from ..schema.states import RequestState
from ..system.files import disk_space
from . import errors
from .sql.queries import Query
from .sql.tables import metadata, tally

BUSY_TIMEOUT_SECONDS = 10.0
# Errors of statements that go straight to the driver (`sql/queries.py`). The second one: the file
# is damaged, and a text in it, or in SQLite's own message, is not UTF-8.
DRIVER_ERRORS = (sqlite3.Error, UnicodeDecodeError)
CHECK_SECONDS = 0.5  # of a start; some hundred megabytes
_CHECK_STEPS = 1000  # of SQLite's virtual machine, between looks at the time

_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # Room given back after a burst: a log of 16 MB at most stays behind on disk.
    "PRAGMA journal_size_limit=16777216",
)
# The latter is macOS's, where fsync alone leaves the pages in the disk's own memory.
_SYNCED = ("PRAGMA synchronous=FULL", "PRAGMA fullfsync=ON")
_FREE_BYTES_OF_A_FULL_DISK = 256 * 1024  # less than one growth step of the -shm or -wal file
# What SQLite says where it cannot write, or create, its -shm and -wal files.
_OF_A_FULL_DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})

_LACKING = ("no such table", "no such column")  # SQLite's messages about a wrong schema begin so
_NO_TEXT = "Could not decode to UTF-8 column"  # Python's own, without a code
_ERRORS: dict[int, tuple[type[errors.DatabaseError], str]] = {
    sqlite3.SQLITE_READONLY: (errors.DatabaseUnwritable, "it may not be written"),
    sqlite3.SQLITE_CANTOPEN: (errors.DatabaseUnwritable, "it cannot be opened"),
    sqlite3.SQLITE_PERM: (errors.DatabaseUnwritable, "access is not permitted"),
    sqlite3.SQLITE_CORRUPT: (errors.DatabaseCorrupt, "the file is damaged"),
    sqlite3.SQLITE_NOTADB: (errors.DatabaseCorrupt, "the file is not a SQLite database"),
    sqlite3.SQLITE_BUSY: (errors.DatabaseBusy, "another process holds it"),
}


def create_engine(path: Path, *, syncs: bool = False) -> Engine:
    """An engine whose connections write: each transaction begins by taking the write lock."""
    arguments = {
        "timeout": BUSY_TIMEOUT_SECONDS,
        "check_same_thread": False,  # `WriteConnection` sees to one thread at a time
        "isolation_level": None,  # the driver begins nothing by itself
    }
    url = URL.create("sqlite", database=str(path))
    engine = _create_engine(url, poolclass=NullPool, connect_args=arguments)
    durability = _SYNCED if syncs else ("PRAGMA synchronous=NORMAL",)

    def set_up(connection: Any, _record: Any) -> None:
        for pragma in (*_PRAGMAS, *durability):
            connection.execute(pragma).fetchall()

    event.listen(engine, "connect", set_up)
    event.listen(engine, "begin", lambda begun: begun.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _check(connection: Connection, path: Path) -> None:
    """Look for damaged pages, for at most `CHECK_SECONDS`; the others are found when read.

    Raises `DatabaseCorrupt`: there are some.
    """
    driver: Any = connection.connection.driver_connection
    until = time.monotonic() + CHECK_SECONDS
    driver.set_progress_handler(lambda: time.monotonic() >= until, _CHECK_STEPS)
    try:
        [found] = driver.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        found = "ok"
    finally:
        driver.set_progress_handler(None, 0)
    if found != "ok":
        raise errors.DatabaseCorrupt(f"{path}: the file is damaged ({' '.join(found.split())})")


def _create_file(path: Path) -> None:
    """Make an empty file that only its owner may read; SQLite's own would follow the umask.

    Raises:
        DatabaseUnwritable: the folder is missing or cannot be written.
        DatabaseFull: the disk is full.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        if disk_space.is_full(exc):
            raise _full(path, str(exc.strerror)) from exc
        hint = _read_only_hint(path)
        if isinstance(exc, IsADirectoryError):
            hint = "move the folder away, or point OPENENV_HOME at another one"
        raise errors.DatabaseUnwritable(f"{path}: {exc.strerror}", hint) from exc


def error_of(exc: BaseException | None, path: Path) -> errors.DatabaseError:
    """The `DatabaseError` for an error of the driver."""
    code = getattr(exc, "sqlite_errorcode", None)
    if isinstance(exc, UnicodeDecodeError) or str(exc).startswith(_NO_TEXT):
        return errors.DatabaseCorrupt(f"{path}: the file is damaged (a text in it is no UTF-8)")
    if code is None:
        return errors.DatabaseError(f"{path}: {exc}")
    name = getattr(exc, "sqlite_errorname", "")
    family = code & 0xFF
    if family == sqlite3.SQLITE_FULL or (family in _OF_A_FULL_DISK and _is_full(path)):
        return _full(path, name)
    kind, reason = _ERRORS.get(family, (errors.DatabaseError, str(exc)))
    if str(exc).startswith(_LACKING):
        kind, reason = errors.DatabaseCorrupt, f"the file is damaged: {exc}"
    hint = _read_only_hint(path) if kind is errors.DatabaseUnwritable else None
    return kind(f"{path}: {reason} ({name})", hint)


def _full(path: Path, reason: str) -> errors.DatabaseFull:
    text, hint = disk_space.full(path.parent)
    return errors.DatabaseFull(f"{text} ({reason})", hint)


def _read_only_hint(path: Path) -> str | None:
    """Return a hint for when no permission of the file or folder would help; None: one would."""
    folder = path.parent
    return disk_space.read_only_hint(folder) if disk_space.is_read_only(folder) else None


def _is_full(path: Path) -> bool:
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return False
    # Some file systems count no files, and say 0 of 0.
    return room.f_bavail * room.f_frsize < _FREE_BYTES_OF_A_FULL_DISK or (
        room.f_files > 0 and room.f_favail == 0
    )


class Reader:
    """One connection that only reads, opened when first used and again after an error."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).resolve()
        self._connection: aiosqlite.Connection | None = None
        self._opening = asyncio.Lock()

    async def rows(self, text: str, values: Iterable[Any]) -> list[Any]:
        """The rows of one SELECT, each a tuple."""
        try:
            connection = self._connection or await self._open()
            return list(await connection.execute_fetchall(text, values))
        except DRIVER_ERRORS as exc:
            await self.close()
            raise error_of(exc, self._path) from exc

    async def close(self) -> None:
        """Answer the queries that wait, then close; the next query would open it again."""
        async with self._opening:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()
                connection._thread.join()  # noqa: SLF001  it is at its last instruction

    async def _open(self) -> aiosqlite.Connection:
        async with self._opening:
            if self._connection is None:
                connection = aiosqlite.Connection(self._connect, iter_chunk_size=64)
                thread = connection._thread  # noqa: SLF001
                thread.name = "requests-db-reader"
                # As SQLAlchemy's dialect does: a store that is never closed must not keep the
                # process from exiting.
                thread.daemon = True
                try:
                    self._connection = await connection
                except DRIVER_ERRORS:
                    thread.join()
                    raise
            return self._connection

    def _connect(self) -> sqlite3.Connection:
        """On aiosqlite's thread."""
        address, timeout = f"{self._path.as_uri()}?mode=ro", BUSY_TIMEOUT_SECONDS
        return sqlite3.connect(address, uri=True, timeout=timeout, isolation_level=None)


P = ParamSpec("P")
R = TypeVar("R")


_locks: dict[Path, threading.Lock] = {}  # by path


class WriteConnection:
    """One connection that writes; any thread may use it, one at a time."""

    def __init__(self, path: Path | str, *, syncs: bool = False) -> None:
        """Connects when first used; with `syncs`, each commit waits for the disk."""
        self._path = Path(path).resolve()
        self._engine = create_engine(self._path, syncs=syncs)
        self._lock = _locks.setdefault(self._path, threading.Lock())  # in one step
        self._connection: Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All or nothing: committed at the end of the block, rolled back when it raises."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                with self._connection.begin():
                    yield self._connection
            except (DBAPIError, *DRIVER_ERRORS) as exc:
                self._drop()  # the state of the connection after an error is not known
                orig = exc.orig if isinstance(exc, DBAPIError) else exc
                raise error_of(orig, self._path) from exc

    def write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work` in a transaction, and return what it returns. Blocks."""
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


# Version 1 has the first tables; each function changes a database of the version before.
MIGRATIONS: tuple[Callable[[Connection], object], ...] = ()


def open_database(path: Path | str) -> None:
    """Create the database, or bring it up to date.

    Raises:
        DatabaseError: its subclass says whether the disk is full, the folder unwritable, the file
            damaged or written by a newer version; `hint` says what to do.
    """
    _create_file(Path(path))
    writer = WriteConnection(path)
    try:
        with writer.transaction() as connection:
            _check(connection, Path(path))
            _bring_up_to_date(connection, str(path))
    finally:
        writer.close()


def _bring_up_to_date(connection: Connection, path: str) -> None:
    # 0: nothing is there, or version 1 from before its number was written.
    found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    latest = 1 + len(MIGRATIONS)
    tables = inspect(connection).get_table_names()
    if not tables:
        metadata.create_all(connection)
        zeros = {state.value.lower(): 0 for state in RequestState}
        connection.execute(insert(tally).values(id=1, last_event=0, **zeros))
    elif tally.name not in tables:
        raise errors.DatabaseCorrupt(f"{path} is a database, but not one of openenvd's")
    elif found > latest:
        raise errors.DatabaseTooNew(
            f"{path} is at version {found}; this openenvd knows versions up to {latest}"
        )
    else:
        for migrate in MIGRATIONS[max(found - 1, 0) :]:
            migrate(connection)
    if found != latest:
        connection.exec_driver_sql(f"PRAGMA user_version = {latest}")
