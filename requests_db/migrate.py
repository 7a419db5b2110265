# SPDX-License-Identifier: Apache-2.0
"""`open_database`: makes a database at this code's version of whatever is at the path.

    nothing there            the tables as they are today
    at this version          nothing to do (two queries)
    at an earlier one        the migrations since then
    at a later one           DatabaseTooNew: a newer openenvd wrote it
    something else           DatabaseCorrupt

The version is SQLite's `user_version`. First, damaged pages are looked for. All is one transaction:
a daemon killed in the middle leaves what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, insert, inspect

from ..schema.states import RequestState
from . import connections
from .connections import WriteConnection
from .errors import DatabaseCorrupt, DatabaseTooNew
from .sql.tables import metadata, tally

# Version 1 has the first tables; each function changes a database of the version before.
MIGRATIONS: tuple[Callable[[Connection], object], ...] = ()


def open_database(path: Path | str) -> None:
    """Create the database, or bring it up to date.

    Raises:
        DatabaseError: its subclass says whether the disk is full, the folder unwritable, the file
            damaged or written by a newer version; `hint` says what to do.
    """
    connections.create_file(Path(path))
    writer = WriteConnection(path)
    try:
        with writer.transaction() as connection:
            connections.check(connection, Path(path))
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
        raise DatabaseCorrupt(f"{path} is a database, but not one of openenvd's")
    elif found > latest:
        raise DatabaseTooNew(
            f"{path} is at version {found}; this openenvd knows versions up to {latest}"
        )
    else:
        for migrate in MIGRATIONS[max(found - 1, 0) :]:
            migrate(connection)
    if found != latest:
        connection.exec_driver_sql(f"PRAGMA user_version = {latest}")
