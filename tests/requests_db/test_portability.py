# SPDX-License-Identifier: Apache-2.0
"""Nothing outside `dialect.py` is SQLite's alone: the same SQL suits PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Executable, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from openenvd.requests_db.connections import sqlite
from openenvd.requests_db.sql import statements
from openenvd.requests_db.sql.tables import declare_partial_indexes, metadata

DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]
BUILT = {name: it for name, it in vars(statements).items() if isinstance(it, Executable)}


@pytest.mark.parametrize("statement", BUILT.values(), ids=BUILT)
def test_every_statement_compiles_for_postgresql(statement: Executable) -> None:
    assert str(statement.compile(dialect=DIALECT))  # type: ignore[attr-defined]


@pytest.mark.parametrize("table", metadata.sorted_tables, ids=lambda table: table.name)
def test_every_table_compiles_for_postgresql(table: Table) -> None:
    declare_partial_indexes("postgresql")
    assert str(CreateTable(table).compile(dialect=DIALECT))
    for index in table.indexes:
        is_partial = index.dialect_kwargs.get("sqlite_where") is not None
        assert (" WHERE " in str(CreateIndex(index).compile(dialect=DIALECT))) is is_partial


def test_concurrent_claims_skip_each_other_where_rows_are_locked() -> None:
    assert "FOR UPDATE SKIP LOCKED" in str(statements.CLAIM.compile(dialect=DIALECT))


def test_a_path_becomes_an_address_and_an_address_stays_one() -> None:
    assert str(sqlite.database_url(Path("/a/requests.db"))) == "sqlite:////a/requests.db"
    assert str(sqlite.database_url("/a/r.db")) == "sqlite:////a/r.db"
    address = "postgresql+psycopg://host/requests"
    assert str(sqlite.database_url(address)) == address
