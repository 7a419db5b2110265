# SPDX-License-Identifier: Apache-2.0
"""How SQLite is opened and set up, and what its errors mean.

Durability. The log is written ahead (WAL) with `synchronous=NORMAL`: a commit has handed its
pages to the kernel when it returns. An acknowledged write survives `kill -9`, but a power cut may
lose the last commits; with `syncs`, each commit waits until they are on the disk:
`docs/decisions/0013-durable-against-a-killed-process.md`.

Locking. SQLite lets one connection write at a time, and lets the others *poll* for their turn with
sleeps of up to 100 ms. Writers inside the daemon therefore take turns by a lock of our own
(`write_connection.py`), and `BEGIN IMMEDIATE` claims SQLite's before anything is read, so that no
transaction fails half way because another wrote first. The busy time-out is for other processes.
Connections that read are opened `mode=ro`: they can neither take the write lock nor create a file.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy import create_engine as _create_engine
from sqlalchemy.pool import NullPool

from ...system.files import disk_space
from ..errors import DatabaseBusy, DatabaseCorrupt, DatabaseError, DatabaseFull, DatabaseUnwritable

BUSY_TIMEOUT_SECONDS = 10.0
# Of statements that go straight to the driver (`prepared.py`). The latter: of a damaged file, a
# text, or the text of SQLite's own message, is no UTF-8.
DRIVER_ERRORS = (sqlite3.Error, UnicodeDecodeError)
CHECK_SECONDS = 0.5  # of a start; some hundred megabytes
_CHECK_STEPS = 1000  # of SQLite's virtual machine, between looks at the time
MAX_PARAMETERS = 500  # of one IN list; SQLite before 3.32 allows 999 parameters

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

_NO_TEXT = "Could not decode to UTF-8 column"  # Python's own, without a code
_ERRORS: dict[int, tuple[type[DatabaseError], str]] = {
    sqlite3.SQLITE_READONLY: (DatabaseUnwritable, "it may not be written"),
    sqlite3.SQLITE_CANTOPEN: (DatabaseUnwritable, "it cannot be opened"),
    sqlite3.SQLITE_PERM: (DatabaseUnwritable, "access is not permitted"),
    sqlite3.SQLITE_AUTH: (DatabaseUnwritable, "access is not permitted"),
    sqlite3.SQLITE_CORRUPT: (DatabaseCorrupt, "the file is damaged"),
    sqlite3.SQLITE_NOTADB: (DatabaseCorrupt, "the file is not a SQLite database"),
    sqlite3.SQLITE_BUSY: (DatabaseBusy, "another process holds it"),
    sqlite3.SQLITE_LOCKED: (DatabaseBusy, "another connection holds it"),
}


def create_engine(path: Path, busy_timeout_seconds: float, *, syncs: bool = False) -> Engine:
    """An engine whose connections write: each transaction begins by taking the write lock.

    With `syncs`, each commit makes one fsync, and survives a power cut.
    """
    arguments = {
        "timeout": busy_timeout_seconds,
        "check_same_thread": False,  # `WriteConnection` sees to one thread at a time
        "isolation_level": None,  # the driver begins nothing by itself: see _begin_immediate
    }
    url = URL.create("sqlite", database=str(path))
    engine = _create_engine(url, poolclass=NullPool, connect_args=arguments)
    durability = _SYNCED if syncs else ("PRAGMA synchronous=NORMAL",)
    event.listen(engine, "connect", partial(_set_up, (*_PRAGMAS, *durability)))
    event.listen(engine, "begin", _begin_immediate)
    return engine


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that can only read, and sees each commit from its next statement on.

    Raises:
        sqlite3.Error: the file is missing, or cannot be opened.
    """
    address = f"{path.as_uri()}?mode=ro"
    return sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)


def check(connection: Connection, path: Path) -> None:
    """Look for damaged pages, for at most `CHECK_SECONDS`; what is not reached is met when read.

    Raises:
        DatabaseCorrupt: there are some.
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
        raise DatabaseCorrupt(f"{path}: the file is damaged ({' '.join(found.split())})")


def create_file(path: Path) -> None:
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
        raise DatabaseUnwritable(f"{path}: {exc.strerror}", _read_only_hint(path)) from exc


def error_of(exc: BaseException | None, path: Path) -> DatabaseError:
    """The `DatabaseError` for an error of the driver."""
    code = getattr(exc, "sqlite_errorcode", None)
    if isinstance(exc, UnicodeDecodeError) or str(exc).startswith(_NO_TEXT):
        return DatabaseCorrupt(f"{path}: the file is damaged (a text in it is no UTF-8)")
    if code is None:
        return DatabaseError(f"{path}: {exc}")
    name = getattr(exc, "sqlite_errorname", "")
    family = code & 0xFF
    if family == sqlite3.SQLITE_FULL or (family in _OF_A_FULL_DISK and _is_full(path)):
        return _full(path, name)
    kind, reason = _ERRORS.get(family, (DatabaseError, str(exc)))
    hint = _read_only_hint(path) if kind is DatabaseUnwritable else None
    return kind(f"{path}: {reason} ({name})", hint)


def _set_up(pragmas: Iterable[str], connection: Any, _record: Any) -> None:
    for pragma in pragmas:
        connection.execute(pragma).fetchall()


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _full(path: Path, reason: str) -> DatabaseFull:
    text, hint = disk_space.full_text(path.parent), disk_space.full_hint(path.parent)
    return DatabaseFull(f"{text} ({reason})", hint)


def _read_only_hint(path: Path) -> str | None:
    """What to do where no permission of the file or its folder would help; None: that may."""
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
