# SPDX-License-Identifier: Apache-2.0
"""`open_database`: makes a database at this code's version of whatever is at the path.

    nothing there            the tables as they are today, stamped with the latest revision
    at the latest revision   nothing to do (one query)
    at an earlier one        Alembic's upgrade; Alembic is imported only here and only then
    at one unknown to us     DatabaseTooNew: a newer openenvd wrote it
    something else           DatabaseCorrupt

First, damaged pages are looked for. Each is one transaction: a daemon killed in the middle leaves
what was there before.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, insert, inspect, select

from ..schema.states import RequestState
from . import connections
from .connections import WriteConnection
from .errors import DatabaseCorrupt, DatabaseTooNew
from .sql.tables import metadata, tally

# In their order; a test compares them with the files in `migrations/versions`.
REVISIONS = ("0001",)
LATEST = REVISIONS[-1]

# As Alembic would make it; a test lets Alembic read it.
_version = Column("version_num", String(32), primary_key=True)
_versions = Table("alembic_version", MetaData(), _version)


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
    tables = inspect(connection).get_table_names()
    if not tables:
        _create(connection)
        return
    found: str | None = None
    if _versions.name in tables:
        found = connection.execute(select(_version)).scalar()
    if found == LATEST:
        return
    if found in REVISIONS:
        upgrade(connection)
    elif found is not None and found.isdigit() and found > LATEST:
        raise DatabaseTooNew(
            f"{path} is at revision {found}; this version knows revisions up to {LATEST}"
        )
    else:
        raise DatabaseCorrupt(f"{path} is a database, but not one of openenvd's")


def upgrade(connection: Connection) -> None:
    """Apply the numbered migrations, in the connection's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    command.upgrade(config, "head")


def _create(connection: Connection) -> None:
    metadata.create_all(connection)
    zeros = {state.value.lower(): 0 for state in RequestState}
    connection.execute(insert(tally).values(id=1, last_event=0, **zeros))
    _versions.create(connection)
    connection.execute(insert(_versions).values(version_num=LATEST))
