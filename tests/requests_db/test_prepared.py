# SPDX-License-Identifier: Apache-2.0
"""The parts of SQLAlchemy and aiosqlite that are not documented, and that we reach into."""

from __future__ import annotations

from typing import Any

import aiosqlite
import pytest
from sqlalchemy import Executable, create_engine
from sqlalchemy.dialects import sqlite

from openenvd.requests_db.records import NewRequest
from openenvd.requests_db.sql import queries, statements
from openenvd.requests_db.sql.rows import REQUESTS, insert_values, new_request
from openenvd.schema.states import Schedule

BUILT = {name: it for name, it in vars(statements).items() if isinstance(it, Executable)}
NEW = insert_values(new_request("7f3a", NewRequest("check", Schedule.SHORT, {}), 1.5, 2.5))


def test_sqlalchemy_still_gives_the_order_of_a_compiled_statements_parameters() -> None:
    compiled: Any = statements.CLAIM.compile(dialect=sqlite.dialect(paramstyle="qmark"))
    assert hasattr(compiled, "positiontup"), (
        "SQLAlchemy's compiled statements have no `positiontup` any more: `sql/queries.py` needs"
        " another way to the order of the parameters"
    )
    assert {"attempts_1", "now", "of_schedule", "up_to"} <= set(compiled.positiontup)
    assert compiled.params["attempts_1"] == 1


def test_sqlalchemy_still_gives_the_drivers_connection() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        assert queries._driver(connection).execute("SELECT 1").fetchall() == [(1,)], (
            "`connection.connection.driver_connection` is no longer sqlite3's connection:"
            " `sql/queries.py` needs another way to the driver"
        )
    engine.dispose()


def test_aiosqlite_still_holds_its_thread_where_the_reader_makes_it_a_daemon() -> None:
    connection = aiosqlite.Connection(lambda: None, iter_chunk_size=64)  # type: ignore[arg-type, return-value]
    assert hasattr(connection, "_thread"), (
        "aiosqlite's connection holds its thread elsewhere: `connections/reader.py` must make it a"
        " daemon thread in another way"
    )


@pytest.mark.parametrize("statement", BUILT.values(), ids=BUILT)
def test_every_statement_can_be_compiled(statement: Executable) -> None:
    assert str(statement.compile(dialect=sqlite.dialect()))  # type: ignore[attr-defined]


def test_a_prepared_insert_has_a_value_for_each_column_it_names() -> None:
    insert = queries.prepare(statements.INSERT_REQUEST, tuple(NEW))
    assert insert.text.count("?") == len(insert.values(NEW)) == len(NEW)


def test_a_record_is_stored_in_the_columns_named_like_its_fields() -> None:
    assert {column.name for column in REQUESTS.columns} == {*NEW} | {"seq"}
