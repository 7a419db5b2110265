# SPDX-License-Identifier: Apache-2.0
"""Converts between rows and records: a record's field is the column of the same name.

And the order of the queue: a request's `rank`, by the clock on which it arrives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import orjson
from sqlalchemy import Table

from ...schema import states
from ..errors import DatabaseCorrupt
from ..records import (
    Environment,
    Event,
    Generation,
    MemoryEstimate,
    NewRequest,
    PeakSample,
    Replica,
    Request,
    RequestError,
)
from .tables import environments, events, expectations, generations, replicas, requests

# A wait of this length raises a request as much as one step of priority does, so that no request
# starves.
PRIORITY_STEP_SECONDS = 60.0

R = TypeVar("R")
Row = Any  # a tuple in the order of a `RowFormat`'s columns
Values = dict[str, Any]


class Conversion(NamedTuple):
    """The conversion of a field's value to its column and back; NULL is None on either side."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class RowFormat(Generic[R]):
    """The row format of a kind of record: the columns are those named like its fields, in order."""

    def __init__(self, record: type[Any], table: Table, **converted: Conversion) -> None:
        self._record = record
        self._names = [field.name for field in fields(record) if field.name in table.c]
        self._pick = attrgetter(*self._names)
        self._converted = [(self._names.index(name), c) for name, c in converted.items()]
        self._decoded = [(index, c.decode) for index, c in self._converted]
        self.columns = tuple(table.c[name] for name in self._names)

    def read(self, row: Row) -> R:
        """The record in a row of `columns`.

        Raises `DatabaseCorrupt`: a value is not as it was written.
        """
        values = list(row)
        try:
            for index, decode in self._decoded:
                if values[index] is not None:
                    values[index] = decode(values[index])
        except (ValueError, KeyError, TypeError) as exc:
            text = f"the requests database is damaged ({self.columns[index]})"
            raise DatabaseCorrupt(text) from exc
        record: R = self._record(*values)
        return record

    def read_all(self, rows: Iterable[Row]) -> list[R]:
        """The record of each row."""
        return [self.read(row) for row in rows]

    def read_first(self, rows: list[Row]) -> R | None:
        """The record of the first row, or None."""
        return self.read(rows[0]) if rows else None

    def values(self, record: R) -> Values:
        """The value of each column."""
        values = list(self._pick(record))
        for index, conversion in self._converted:
            if values[index] is not None:
                values[index] = conversion.encode(values[index])
        return dict(zip(self._names, values, strict=True))

    def parameters(self, record: R, *names: str) -> Values:
        """The parameters of an UPDATE (`to_state`) that takes these columns."""
        values = self.values(record)
        return {f"to_{name}": values[name] for name in names}


def to_json(value: Any) -> str:
    """`value` as JSON text."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer beyond 64 bits, half a surrogate pair: rare, and valid JSON
        return json.dumps(value)


def from_json(text: str) -> Any:
    """The value that `to_json` wrote."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def error_to_json(error: RequestError | None) -> str | None:
    """An error as its column holds it."""
    return None if error is None else to_json(asdict(error))


def _error_from_json(text: str) -> RequestError:
    data = from_json(text)
    return RequestError(
        **data | {"kind": states.ErrorKind(data["kind"]), "log_tail": tuple(data["log_tail"])}
    )


def _state(kind: type[StrEnum]) -> Conversion:
    return Conversion(attrgetter("value"), {member.value: member for member in kind}.__getitem__)


_JSON = Conversion(to_json, from_json)
_ERROR = Conversion(error_to_json, _error_from_json)
_SAMPLES = Conversion(
    lambda samples: to_json([[s.at, s.peak_bytes, s.killed] for s in samples]),
    lambda text: tuple(PeakSample(*sample) for sample in from_json(text)),
)

REQUESTS = RowFormat[Request](
    Request,
    requests,
    schedule=_state(states.Schedule),
    payload=_JSON,
    state=_state(states.RequestState),
    result=_JSON,
    error=_ERROR,
    retry_oom=Conversion(int, bool),
)
ENVIRONMENTS = RowFormat[Environment](
    Environment, environments, spec=_JSON, state=_state(states.EnvironmentState), error=_ERROR
)
GENERATIONS = RowFormat[Generation](
    Generation, generations, spec=_JSON, state=_state(states.GenerationState)
)
REPLICAS = RowFormat[Replica](Replica, replicas, state=_state(states.ReplicaState), exit=_JSON)
EVENTS = RowFormat[Event](Event, events, data=_JSON)
ESTIMATES = RowFormat[MemoryEstimate](MemoryEstimate, expectations, samples=_SAMPLES)

_ASKED_FOR = [field.name for field in fields(NewRequest)]


def new_request(request_id: str, new: NewRequest, now: float, arrival: float) -> Request:
    """`new` as it will be in the table, but for its `seq`."""
    asked_for = {name: getattr(new, name) for name in _ASKED_FOR}
    rank = arrival - PRIORITY_STEP_SECONDS * new.priority
    state = states.RequestState.PENDING
    return Request(id=request_id, state=state, created_at=now, rank=rank, **asked_for)


def arrival_of(request: Request) -> float:
    """Return when the request arrived, on the queue's clock."""
    return request.rank + PRIORITY_STEP_SECONDS * request.priority


class QueueClock:
    """The time by which pending requests age: seconds that never step. Any thread may ask.

    The wall clock may step, by a day or by years (a laptop that meets its time server), and the
    monotonic clock starts again with each boot. So arrivals are monotonic seconds, counted in each
    life of the daemon from the youngest unfinished request's arrival: a later request never has an
    earlier arrival, and all that wait age alike. Time without a daemon counts for none of them.
    """

    def __init__(self, latest_arrival: float = 0.0) -> None:
        """Continues from `latest_arrival`, on the clock of an earlier daemon."""
        self._ahead = latest_arrival - time.monotonic()

    def now(self) -> float:
        """The arrival of a request that is written now."""
        return time.monotonic() + self._ahead
