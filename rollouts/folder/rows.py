# SPDX-License-Identifier: Apache-2.0
"""Rows of steps and episodes, whose fields are parsed when they are first read.

    LineRow      a line of JSONL. Reading the observation first parses the whole line; reading any
                 other field skips the observation
    ColumnsRow   a row of a file in columns (see `column_files`): what is not asked for is not read

A row that is kept keeps its own line and what was parsed of it, and nothing of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..episodes import Array, BytesLike
from ..errors import OutputDamaged
from ..json_values import parse
from .columnar import arrow

if TYPE_CHECKING:
    import numpy as np

    from .column_files import ColumnsRow

    # From the arrays of a step, and where the block of its episode begins, to mapped arrays.
    MapArrays = Callable[[Sequence[Mapping[str, Any]], int], dict[str, "MappedArray"]]

HEAVIEST = "observation"
_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class LineRow:
    """A line, which becomes values."""

    __slots__ = ("_fields", "_line")

    def __init__(self, line: bytes) -> None:
        self._line: bytes | None = line
        self._fields: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        line = self._line
        if line is not None:
            self._fields = _parsed(line) if name == HEAVIEST else _skimmed(line)
            self._line = None  # last: another thread may be here
        value = self._fields[name]
        if isinstance(value, msgspec.Raw):
            value = self._fields[name] = _parsed(memoryview(value))
        return value

    def whole(self) -> dict[str, Any]:
        """All of it."""
        line = self._line
        if line is not None:
            self._fields = _parsed(line)
            self._line = None
        return {name: self[name] for name in self._fields}


def _skimmed(line: bytes) -> dict[str, Any]:
    """The texts of its fields; their values, where only the standard library can read them."""
    try:
        return _skim(line)
    except msgspec.DecodeError:
        found: dict[str, Any] = _parsed(line)
        return found


def _parsed(text: BytesLike) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as exc:
        hint = "`Rollouts.verify` says which file has changed since it was written"
        raise OutputDamaged(f"a row is not JSON: {exc}", hint) from exc


@dataclass(frozen=True, slots=True)
class MappedArray(Array):
    """An array in a mapped file: its pages are read when they are touched, and never copied.

    Only on the way to another process, which maps nothing, it is copied.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedArray, (bytes(self.data), self.dtype, self.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """As numpy's, read-only, on the same memory."""
        numpy = arrow("numpy")
        found: np.ndarray[Any, Any] = numpy.ndarray(self.shape, self.dtype, self.data)
        return found


class StepRow:
    """One step, as it was written. Each field is parsed when it is first asked for, and kept."""

    __slots__ = ("_map_arrays", "_mapped", "_row", "_start")

    def __init__(self, row: LineRow | ColumnsRow, map_arrays: MapArrays, start: int) -> None:
        self._row = row
        self._map_arrays = map_arrays
        self._start = start  # of the episode's block in the file of arrays
        self._mapped: dict[str, MappedArray] | None = None

    def __repr__(self) -> str:
        return f"StepRow(number={self.number}, reward={self.reward}, done={self.done})"

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        found: int = self._row["step"]
        return found

    @property
    def observation(self) -> Any:
        """The observation that the policy saw."""
        return self._row["observation"]

    @property
    def action(self) -> Any:
        """The action of the policy."""
        return self._row["action"]

    @property
    def reward(self) -> float | None:
        """The reward of the action."""
        found: float | None = self._row["reward"]
        return found

    @property
    def done(self) -> bool:
        """Whether the environment ended the episode with this step."""
        found: bool = self._row["done"]
        return found

    @property
    def info(self) -> Mapping[str, Any]:
        """What the policy noted, and the environment's `metadata`."""
        found: Mapping[str, Any] = self._row["info"]
        return found

    @property
    def arrays(self) -> Mapping[str, MappedArray]:
        """The large arrays of the step, on the mapped file."""
        if self._mapped is None:
            self._mapped = self._map_arrays(self._row["arrays"], self._start)
        return self._mapped
