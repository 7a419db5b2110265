# SPDX-License-Identifier: Apache-2.0
"""The statements that every request pays for, compiled once and given straight to the driver.

SQLAlchemy compiles a statement once, too, but then still spends several times what SQLite itself
takes on each execution and on each row of parameters. So what `statements.py` built is translated
to text once, and its parameters to tuples. Parameters that are lists (`IN`) are not for here: their
number is part of the text.
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A statement as the driver takes it: its text, and its parameters' values in their order."""

    text: str
    values: Callable[[Parameters], tuple[Any, ...]]


@cache
def prepare(statement: Executable, keys: tuple[str, ...]) -> Prepared:
    """The statement as text, for parameters of these names (an INSERT names its columns so)."""
    compiled: Any = statement.compile(  # type: ignore[attr-defined]
        dialect=sqlite.dialect(paramstyle="qmark"), column_keys=keys
    )
    names: list[str] = compiled.positiontup
    literals = {name: value for name, value in compiled.params.items() if name not in keys}
    return Prepared(str(compiled), _in_order(names, literals))


def rows(connection: Connection, statement: Executable, parameters: Parameters) -> list[Any]:
    """The rows that the statement returns, each a tuple."""
    prepared = prepare(statement, tuple(parameters))
    return _driver(connection).execute(prepared.text, prepared.values(parameters)).fetchall()  # type: ignore[no-any-return]


def row(connection: Connection, statement: Executable, parameters: Parameters) -> Any:
    """The only row, or None."""
    found = rows(connection, statement, parameters)
    return found[0] if found else None


def scalar(connection: Connection, statement: Executable, parameters: Parameters) -> Any:
    """The first value of the only row."""
    return rows(connection, statement, parameters)[0][0]


def each(connection: Connection, statement: Executable, many: Sequence[Parameters]) -> None:
    """Execute the statement once for each of `many`; nothing is returned."""
    if many:
        prepared = prepare(statement, tuple(many[0]))
        _driver(connection).executemany(prepared.text, map(prepared.values, many))


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
