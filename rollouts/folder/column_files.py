# SPDX-License-Identifier: Apache-2.0
"""Reads files in columns, Parquet or Arrow: of each row group what is asked for, when it is.

    ColumnsFile.rows ─▶ ColumnsRow["reward"] ─▶ Recent ─▶ _Group ─▶ that column of the row's group

A row refers to its group by number, and the group is read again when it is needed later: a kept
row keeps no group. Writing is `columnar`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import OutputDamaged
from ..json_values import parse
from .columnar import JSON_COLUMNS, arrow
from .layout import PARQUET
from .open_files import Recent, opened

MOST_GROUPS = 2  # in memory; a group is `columnar.BATCH_BYTES`, or one row
_MOST_COLUMNS = 64  # of a group: all of them


class ColumnsFile:
    """Rows by their number."""

    def __init__(self, paths: Sequence[Path], form: str, groups: Recent) -> None:
        self._paths = tuple(paths)
        self._open: Callable[[Path], _Parquet | _Arrow] = _Parquet if form == PARQUET else _Arrow
        self._groups = groups

    def rows(self, first: int, count: int) -> Iterator[ColumnsRow]:
        """So many from there on."""
        if first + count > self._ends[-1]:
            raise OutputDamaged(f"{self._paths[-1]} has {self._ends[-1]} rows, not {first + count}")
        for number in range(first, first + count):
            group = bisect_right(self._ends, number) - 1
            yield ColumnsRow(self, group, number - self._ends[group])

    def value(self, group: int, at: int, name: str) -> Any:
        """One field; it is a text's where the column has texts of JSON."""
        key = (self._paths[-1], group)
        found = self._groups.get(key, lambda: _Group(self._opened(), group))
        try:
            value = found.column(name)[at]
            return parse(memoryview(value.as_buffer())) if name in JSON_COLUMNS else value.as_py()
        except (OSError, ValueError, RecursionError) as exc:  # Arrow's and JSON's
            raise self._damaged(exc) from exc

    @property
    def names(self) -> list[str]:
        """Of its columns."""
        return self._told[0]

    @property
    def _ends(self) -> list[int]:
        """0, and the number of the row after each group."""
        return self._told[1]

    @cached_property
    def _told(self) -> tuple[list[str], list[int]]:
        file = self._opened()
        return file.names, [0, *accumulate(file.counts)]

    def _opened(self) -> _Parquet | _Arrow:
        try:
            return opened(self._paths, self._open)
        except ValueError as exc:  # Arrow's, of a file that is not what its name says
            raise self._damaged(exc) from exc

    def _damaged(self, exc: Exception) -> OutputDamaged:
        return OutputDamaged(f"{self._paths[-1]} cannot be understood: {exc}")


@dataclass(eq=False, slots=True)
class ColumnsRow:
    """A row; its fields are read when they are asked for, and kept."""

    _file: ColumnsFile
    _group: int
    _at: int
    _fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            self._fields[name] = self._file.value(self._group, self._at, name)
        return self._fields[name]

    def whole(self) -> dict[str, Any]:
        """All of it."""
        return {name: self[name] for name in self._file.names}


class _Parquet:
    """An open Parquet file."""

    def __init__(self, path: Path) -> None:
        self._file = arrow("pyarrow.parquet").ParquetFile(path)
        metadata = self._file.metadata
        self.counts = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        self.names: list[str] = self._file.schema_arrow.names

    def column(self, group: int, name: str) -> Any:
        column = self._file.read_row_group(group, columns=[name], use_threads=False).column(0)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class _Arrow:
    """An open Arrow file, mapped."""

    def __init__(self, path: Path) -> None:
        pyarrow = arrow()
        self._file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        batches = range(self._file.num_record_batches)
        self.counts = [self._file.get_batch(n).num_rows for n in batches]
        self.names: list[str] = self._file.schema.names

    def column(self, group: int, name: str) -> Any:
        return self._file.get_batch(group).column(name)


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group, of an open file of its own: Parquet's reader serves one thread at a time."""

    _file: _Parquet | _Arrow
    _number: int
    _columns: Recent = field(default_factory=lambda: Recent(_MOST_COLUMNS))

    def column(self, name: str) -> Any:
        return self._columns.get(name, lambda: self._file.column(self._number, name))
