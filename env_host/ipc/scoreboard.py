# SPDX-License-Identifier: Apache-2.0
"""The board: what each shard says of itself, in memory that all processes of a replica share.

    host ── makes it, before the first fork; gives slots out, clears those of the dead
    shard i ── writes slot i alone ──▶ board ◀── everyone reads all of it

No locks and no messages: a slot is a row of 64-bit integers, each written whole, and nobody relies
on two of them having been written together. Times are microseconds of the monotonic clock, which
is one for all processes of a machine.

The memory has a descriptor, so that a shard that is a fresh program can map it too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from enum import IntEnum

MICROSECONDS = 1_000_000
ALIVE_SECONDS = 1.0  # a shard whose loop has not turned for so long is not counted on
_WORD_BYTES = 8


class Word(IntEnum):
    """The words of a slot, by their place."""

    PID = 0  # 0: nobody
    GENERATION = 1  # how many processes have had the slot
    MAX_SESSIONS = 2
    SESSIONS = 3  # slots taken
    PROMISED = 4  # connections let in whose session has not begun yet
    WAITING = 5  # connections that wait for a slot
    OLDEST_WAIT = 6  # since when the first of them waits; 0: nobody waits
    CONNECTIONS = 7  # accepted ones, ever
    REFUSED = 8  # sessions, ever
    BEGUN = 9  # sessions, ever
    HANDED_OVER = 10  # connections given to another process, ever
    STEPS = 11  # calls of reset and step, ever
    HEARTBEAT = 12  # when its loop turned last
    LAG_P50 = 13
    LAG_P99 = 14
    LAG_MAX = 15
    LOOP_STATE = 16  # an index into the names of `lag.LoopState`
    READY = 17  # 1: it accepts
    STOPPING = 18  # 1: it does not any more
    BUSY = 19  # calls of environments in progress
    STEP_TIMEOUTS = 20  # ever
    ISOLATED = 21  # 1: a session's own process
    WATCHDOG = 22  # when its watchdog's thread, which needs no loop, was heard of last
    ARRIVING = 24  # connections accepted whose first request is not known yet


_WORDS = 32  # room for more without a new layout
_SLOT_BYTES = _WORDS * _WORD_BYTES


class Slot:
    """One shard's row: a window on the board."""

    __slots__ = ("_words", "index")

    def __init__(self, index: int, words: memoryview) -> None:
        self.index = index
        self._words = words

    def __getitem__(self, word: Word) -> int:
        value: int = self._words[word]
        return value

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def add(self, word: Word, count: int = 1) -> None:
        """Count up; by the slot's owner alone."""
        self._words[word] += count

    def clear(self, *, keep: tuple[Word, ...] = (Word.GENERATION,)) -> None:
        """Nobody has the slot any more."""
        for word in Word:
            if word not in keep:
                self._words[word] = 0

    @property
    def room(self) -> int:
        """How many more sessions fit; never negative."""
        words = self._words
        taken = words[Word.SESSIONS] + words[Word.PROMISED]
        return max(0, words[Word.MAX_SESSIONS] - taken) if self.is_serving else 0

    @property
    def load(self) -> int:
        """Sessions, here, about to begin, and what may become one."""
        words = self._words
        load: int = words[Word.SESSIONS] + words[Word.PROMISED] + words[Word.ARRIVING]
        return load

    @property
    def is_serving(self) -> bool:
        """Whether it accepts sessions, or would, had it room."""
        words = self._words
        return bool(words[Word.PID] and words[Word.READY] and not words[Word.STOPPING])

    def is_turning(self, now: int) -> bool:
        """Whether its loop has turned lately; `now` in microseconds."""
        beat: int = self._words[Word.HEARTBEAT]
        return self.is_serving and now - beat < ALIVE_SECONDS * MICROSECONDS


class Board:
    """The slots of all shards, then those of isolated sessions."""

    def __init__(self, fd: int, shards: int, extra: int = 0) -> None:
        self.fd = fd
        self.shards = shards
        self._map = mmap.mmap(fd, _SLOT_BYTES * (shards + extra))
        words = memoryview(self._map).cast("q")
        rows = range(shards + extra)
        self._slots = [Slot(i, words[i * _WORDS : (i + 1) * _WORDS]) for i in rows]

    @classmethod
    def create(cls, shards: int, extra: int = 0) -> Board:
        """A new board, all slots empty."""
        fd = _anonymous_file()
        os.ftruncate(fd, _SLOT_BYTES * (shards + extra))
        return cls(fd, shards, extra)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def serving_slots(self) -> list[Slot]:
        """The shards, without isolated sessions."""
        return self._slots[: self.shards]

    def others(self, index: int) -> list[Slot]:
        """The shards beside one."""
        return [slot for slot in self.serving_slots() if slot.index != index]

    def total(self, word: Word) -> int:
        """Of all slots together."""
        return sum(slot[word] for slot in self._slots)


def now_microseconds() -> int:
    """The board's clock."""
    return time.monotonic_ns() // 1000


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("openenvd-board", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
