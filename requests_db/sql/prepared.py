# SPDX-License-Identifier: Apache-2.0
"""The statements that every request pays for, compiled once and given straight to the driver.

SQLAlchemy compiles a statement once, too, but then still spends several times what SQLite itself
takes on each execution and on each row of parameters. So for SQLite what `statements.py` built is
translated to text once, and its parameters to tuples; any other database goes through SQLAlchemy.
Parameters that are lists (`IN`) are not for here: their number is part of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql.base import Executable

Parameters = dict[str, Any]


def rows(connection: Connection, statement: Executable, parameters: Parameters) -> list[Any]:
    """What the statement returns, each row a tuple."""
    if connection.dialect.name != "sqlite":
        return list(connection.execute(statement, parameters).all())
    prepared = _prepare(statement, tuple(parameters))
    return _driver(connection).execute(prepared.text, prepared.values(parameters)).fetchall()  # type: ignore[no-any-return]


def row(connection: Connection, statement: Executable, parameters: Parameters) -> Any:
    """The only row, or None."""
    found = rows(connection, statement, parameters)
    return found[0] if found else None


def scalar(connection: Connection, statement: Executable, parameters: Parameters) -> Any:
    """The first value of the only row."""
    return rows(connection, statement, parameters)[0][0]


def each(connection: Connection, statement: Executable, many: Sequence[Parameters]) -> None:
    """Execute the statement once for each; nothing is returned."""
    if not many:
        return
    if connection.dialect.name != "sqlite":
        connection.execute(statement, list(many))
        return
    prepared = _prepare(statement, tuple(many[0]))
    _driver(connection).executemany(prepared.text, map(prepared.values, many))


@dataclass(frozen=True, slots=True)
class _Prepared:
    text: str
    values: Callable[[Parameters], tuple[Any, ...]]


@cache
def _prepare(statement: Executable, keys: tuple[str, ...]) -> _Prepared:
    """The statement as text, for parameters of these names (an INSERT names its columns so)."""
    compiled: Any = statement.compile(  # type: ignore[attr-defined]
        dialect=sqlite.dialect(paramstyle="qmark"), column_keys=keys
    )
    names: list[str] = compiled.positiontup
    literals = {name: value for name, value in compiled.params.items() if name not in keys}
    return _Prepared(str(compiled), _in_order(names, literals))


def _in_order(
    names: Sequence[str], literals: Parameters
) -> Callable[[Parameters], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda parameters: tuple((literals | parameters)[name] for name in names)
    pick: Callable[[Parameters], tuple[Any, ...]] = itemgetter(*names)
    if not literals:
        return pick
    return lambda parameters: pick(literals | parameters)


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection
