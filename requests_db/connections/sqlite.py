# SPDX-License-Identifier: Apache-2.0
"""All that is true of SQLite alone; another database needs a sibling of this module.

Durability. The log is written ahead (WAL) with `synchronous=NORMAL`: a commit has handed its pages
to the kernel when it returns. So what was acknowledged survives the death of the daemon in any
form, `kill -9` included; that is what a queue on one machine must promise. A power cut or a crash
of the kernel may lose the last commits (what was written since the last checkpoint), never the
order of what remains nor the file's integrity. `FULL` would close that gap for one fsync a
commit: a few milliseconds each on ordinary disks, a hundred times what a commit costs here. It is
not worth it, as the workers, the environments and the clients waiting die in the same power cut.

Locking. SQLite lets one connection write at a time, and lets the others *poll* for their turn with
sleeps of up to 100 ms. Writers inside the daemon therefore take turns by a lock of our own
(`connections.py`), and `BEGIN IMMEDIATE` claims SQLite's before anything is read, so that no
transaction fails half way because another wrote first. The busy time-out is for other processes.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, event, make_url
from sqlalchemy import create_engine as _create_engine
from sqlalchemy.pool import NullPool

from ..errors import (
    DatabaseBusy,
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseUnwritable,
)
from ..sql.tables import declare_partial_indexes

BUSY_TIMEOUT_SECONDS = 10.0
DRIVER_ERRORS = (sqlite3.Error,)  # of what goes straight to the driver (`prepared.py`)
MOST_LOG_PAGES = 8192  # 32 MB; a commit that finds more makes the checkpoint itself
MAX_PARAMETERS = 500  # of one IN list; SQLite before 3.32 allows 999 parameters

_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    # Room given back after a burst: a log of 16 MB at most stays behind on disk.
    "PRAGMA journal_size_limit=16777216",
    # Checkpoints are made elsewhere (`checkpoints.py`), unless that fails.
    f"PRAGMA wal_autocheckpoint={MOST_LOG_PAGES}",
)
_FREE_BYTES_OF_A_FULL_DISK = 256 * 1024  # less than one growth step of the -shm or -wal file

_ERRORS: dict[int, tuple[type[DatabaseError], str]] = {
    sqlite3.SQLITE_FULL: (DatabaseFull, "the disk is full"),
    sqlite3.SQLITE_READONLY: (DatabaseUnwritable, "it may not be written"),
    sqlite3.SQLITE_CANTOPEN: (DatabaseUnwritable, "it cannot be opened"),
    sqlite3.SQLITE_PERM: (DatabaseUnwritable, "access is not permitted"),
    sqlite3.SQLITE_AUTH: (DatabaseUnwritable, "access is not permitted"),
    sqlite3.SQLITE_CORRUPT: (DatabaseCorrupt, "the file is damaged"),
    sqlite3.SQLITE_NOTADB: (DatabaseCorrupt, "the file is no SQLite database"),
    sqlite3.SQLITE_BUSY: (DatabaseBusy, "another process holds it"),
    sqlite3.SQLITE_LOCKED: (DatabaseBusy, "another connection holds it"),
}


def database_url(where: Path | str) -> URL:
    """The address of the database in this file; an address is taken as it is."""
    if isinstance(where, str) and "://" in where:
        return make_url(where)
    return URL.create("sqlite", database=str(where))


def create_engine(url: URL, *, writes: bool) -> Engine:
    """An engine whose connections are set up; those that write begin by claiming the file."""
    engine = _create_engine(url, poolclass=NullPool, connect_args=_connect_arguments(url))
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _set_up)
        if writes:
            event.listen(engine, "begin", _begin_immediate)
    else:
        declare_partial_indexes(url.get_backend_name())
    return engine


def needs_checkpoints(url: URL) -> bool:
    """Whether somebody has to move what was committed to where it belongs."""
    return url.get_backend_name() == "sqlite" and bool(url.database)


def checkpoint(url: URL) -> None:
    """Move it, as far as no reader is in the way. Blocks; nobody else is blocked.

    Raises:
        sqlite3.Error
    """
    with closing(sqlite3.connect(str(url.database), timeout=0)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def create_file(url: URL) -> None:
    """Make an empty file that nobody else may read; SQLite's own would follow the umask.

    Raises:
        DatabaseUnwritable, DatabaseFull
    """
    if url.get_backend_name() != "sqlite" or not url.database:
        return
    try:
        os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        kind = DatabaseFull if exc.errno == errno.ENOSPC else DatabaseUnwritable
        raise kind(f"{url.database}: {exc.strerror}") from exc


def error_of(exc: BaseException | None, url: URL) -> DatabaseError:
    """Ours for what the driver raised."""
    where = url.render_as_string(hide_password=True).removeprefix("sqlite:///")
    code = getattr(exc, "sqlite_errorcode", None)
    if code is None:
        return DatabaseError(f"{where}: {exc}")
    name = getattr(exc, "sqlite_errorname", "")
    if code & 0xFF == sqlite3.SQLITE_IOERR and _is_full(url):
        code = sqlite3.SQLITE_FULL  # of the -shm file SQLite says so in other words
    kind, reason = _ERRORS.get(code & 0xFF, (DatabaseError, str(exc)))
    return kind(f"{where}: {reason} ({name})")


def _connect_arguments(url: URL) -> dict[str, Any]:
    if url.get_backend_name() != "sqlite":
        return {}
    return {
        "timeout": BUSY_TIMEOUT_SECONDS,
        "check_same_thread": False,  # one thread at a time is what connections.py sees to
        "isolation_level": None,  # the driver begins nothing by itself: see _begin_immediate
    }


def _set_up(connection: Any, _record: Any) -> None:
    for pragma in _PRAGMAS:
        connection.execute(pragma).fetchall()


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _is_full(url: URL) -> bool:
    try:
        room = os.statvfs(Path(url.database or ".").parent)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < _FREE_BYTES_OF_A_FULL_DISK
