# SPDX-License-Identifier: Apache-2.0
"""The scoreboard: counters of each shard, in memory that all processes of a replica share.

    supervisor ── makes it before the first fork; clears the counters of processes that exited
    shard i ── writes row i alone ──▶ scoreboard ◀── every process reads all rows

No locks and no messages: a row holds 64-bit integers, each written whole, and no reader relies on
two of them having been written together. Times are microseconds of the monotonic clock, which all
processes of a machine share. The memory has a descriptor, so that a shard that was started as a
new program can map it too.

After the rows comes JSON that only the supervisor writes: the last exits of children, and programs
that sessions have left. It is in one of two places; a word before them says which one is complete.
A reader that is overtaken by two reports reads again.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from enum import IntEnum

from ...system.text.json_lines import Json

MICROSECONDS = 1_000_000
ALIVE_SECONDS = 1.0  # a shard whose loop has not run for so long gets no connections
_FIELD_BYTES = 8


class Field(IntEnum):
    """The position of each counter in a row."""

    PID = 0  # 0: no process
    GENERATION = 1  # how many processes this row has had
    MAX_SESSIONS = 2
    SESSIONS = 3  # slots taken
    PROMISED = 4  # connections let in whose session has not begun yet
    WAITING = 5  # connections that wait for a slot
    OLDEST_WAIT = 6  # since when the first of them waits; 0: none does
    CONNECTIONS = 7  # taken of those that it was passed, ever
    REFUSED = 8  # sessions, ever
    BEGUN = 9  # sessions, ever
    HANDED_OVER = 10  # connections given to another process, ever
    STEPS = 11  # calls of reset and step, ever
    HEARTBEAT = 12  # when its loop last ran
    LAG_P50 = 13
    LAG_P99 = 14
    LAG_MAX = 15
    READY = 16  # 1: it accepts
    STOPPING = 17  # 1: it no longer accepts, or the supervisor is about to stop it
    BUSY = 18  # calls of environments in progress
    STEP_TIMEOUTS = 19  # ever
    ISOLATED = 20  # sessions that have processes of their own
    OPEN = 21  # connections that it has
    ARRIVING = 22  # connections taken whose first request is not known yet
    IDLE = 23  # 1: nothing to do, so no heartbeat
    CORDONED = 24  # 1: it is not wanted now; its process, if any, is about to be stopped
    DRAINING = 25  # since when new sessions are refused; 0: they are not
    ABANDONED = 26  # calls that go on although their sessions have ended
    ABANDONED_SINCE = 27  # when the oldest of them began
    ENDED = 28  # sessions that ended because the process was stopped
    LIMITED = 29  # calls in progress that have a time limit
    BRANCHES = 30  # sessions that are copies of others
    CHECKPOINTS = 31  # parked copies of sessions


_OF_THE_ROW = (Field.GENERATION, Field.DRAINING)
_FIELDS = 32  # room for more without a new layout

_ROW_BYTES = _FIELDS * _FIELD_BYTES
_PLACE_BYTES = 8192  # for the supervisor's own, twice
_NEWS_BYTES = _FIELD_BYTES + 2 * _PLACE_BYTES


class Counters:
    """The counters of one process: one row of the scoreboard."""

    __slots__ = ("_values", "index")

    def __init__(self, index: int, values: memoryview) -> None:
        self.index = index
        self._values = values

    def __getitem__(self, field: Field) -> int:
        value: int = self._values[field]
        return value

    def __setitem__(self, field: Field, value: int) -> None:
        self._values[field] = value

    def add(self, field: Field, count: int = 1) -> None:
        """Add to a counter; only the process of the row may."""
        self._values[field] += count

    def clear(self) -> None:
        """Set all counters but those of the row to 0: it has no process any more."""
        for field in Field:
            if field not in _OF_THE_ROW:
                self._values[field] = 0

    @property
    def room(self) -> int:
        """Return how many more sessions the shard can take; never negative."""
        values = self._values
        taken = values[Field.SESSIONS] + values[Field.PROMISED]
        return max(0, values[Field.MAX_SESSIONS] - taken) if self.is_serving else 0

    @property
    def load(self) -> int:
        """Sessions that the shard has, has promised, or may get from connections it is reading.

        Read in the order in which a connection becomes a session, and written the other way round:
        one that changes meanwhile counts twice rather than not at all.
        """
        values = self._values
        load: int = values[Field.ARRIVING] + values[Field.PROMISED] + values[Field.SESSIONS]
        return load

    @property
    def is_serving(self) -> bool:
        """Return whether the shard accepts sessions when it has room."""
        values = self._values
        is_up = values[Field.PID] and values[Field.READY]
        return bool(is_up and not (values[Field.STOPPING] or values[Field.CORDONED]))

    def is_responsive(self, now: int) -> bool:
        """Return whether the shard's loop ran in the last `ALIVE_SECONDS`, or has nothing to do."""
        values = self._values
        is_late = now - values[Field.HEARTBEAT] >= ALIVE_SECONDS * MICROSECONDS
        return self.is_serving and bool(values[Field.IDLE] or not is_late)


class Scoreboard:
    """The rows of all shards."""

    def __init__(self, fd: int, shards: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, size := _ROW_BYTES * shards + _NEWS_BYTES)
        values = memoryview(self._map).cast("q")
        self._news = memoryview(self._map)[size - _NEWS_BYTES + _FIELD_BYTES :]
        self._news_word = values[(size - _NEWS_BYTES) // _FIELD_BYTES :]
        rows = range(shards)
        self._rows = [Counters(i, values[i * _FIELDS : (i + 1) * _FIELDS]) for i in rows]

    @classmethod
    def create(cls, shards: int) -> Scoreboard:
        """Make a new scoreboard whose rows are all empty."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("openenvd-scoreboard", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _ROW_BYTES * shards + _NEWS_BYTES)
        return cls(fd, shards)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Counters:
        return self._rows[index]

    def __iter__(self) -> Iterator[Counters]:
        return iter(self._rows)

    def write_news(
        self, exits: list[Json], left: list[Json], sessions_fail: str | None = None
    ) -> None:
        """Replace what the supervisor shows; the oldest exits are left out if there is no room."""
        while len(data := json.dumps([exits, left, sessions_fail]).encode()) > _PLACE_BYTES:
            exits = exits[1:]
        place = 1 - self._news_word[0] % 2
        self._news[place * _PLACE_BYTES : place * _PLACE_BYTES + len(data)] = data
        self._news_word[0] = len(data) * 2 + place

    def read_news(self) -> tuple[list[Json], list[Json], str | None]:
        """Return the last exits of children, what sessions have left, and why sessions fail."""
        while word := self._news_word[0]:
            start, size = word % 2 * _PLACE_BYTES, word // 2
            data = bytes(self._news[start : start + size])
            if word == self._news_word[0]:
                exits, left, sessions_fail = json.loads(data)
                return exits, left, sessions_fail
        return [], [], None

    def others(self, index: int) -> list[Counters]:
        """Return the counters of all shards but one."""
        return [counters for counters in self if counters.index != index]


def now_microseconds() -> int:
    """Return the time on the scoreboard's clock."""
    return time.monotonic_ns() // 1000
