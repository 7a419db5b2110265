# SPDX-License-Identifier: Apache-2.0
"""Whether a replica's processes may be ended since nobody uses them.

    unused for so long ──ask──▶ each shard: has it a connection? ──none has──▶ all are ended
                                       └─ one has, or does not answer ──▶ used

Any connection is use, whatever is asked through it. The scoreboard alone does not tell: a shard
without sessions does not count its connections. While shards are asked nothing is accepted, so
what they answer stays so; a client that connects meanwhile waits in the kernel's queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ...system.descriptors import Message, send_message
from ..ipc.fd_messages import IS_USED
from ..ipc.scoreboard import MICROSECONDS, Counters, Field
from .children import Child

ANSWER_SECONDS = 0.25  # for the shards to answer: nothing is accepted meanwhile
SETTLE_SECONDS = 0.2  # for what was accepted last to be where it belongs


class Idleness:
    """Since when a replica has not been used, and what its shards say of it. `now` is monotonic."""

    def __init__(self, sleep_after_seconds: float | None) -> None:
        """None: it never ends by itself."""
        self._seconds = sleep_after_seconds
        self._used_at = 0.0
        self._asked: set[int] = set()  # shards that have not answered
        self._answer_by: float | None = None

    @property
    def is_asking(self) -> bool:
        """Whether shards are being asked."""
        return self._answer_by is not None

    @property
    def is_unused(self) -> bool:
        """Whether all that were asked have answered that they are not used."""
        return self.is_asking and not self._asked

    def due(self) -> float | None:
        """When to look again; None: not by itself."""
        if self._answer_by is not None:
            return self._answer_by
        return None if self._seconds is None else self._used_at + self._seconds

    def is_due(self, now: float) -> bool:
        """Whether it has been unused for so long that the shards are to be asked."""
        return self._seconds is not None and now >= self._used_at + self._seconds

    def has_settled(self, now: float) -> bool:
        """Whether it has not been used just now."""
        return now >= self._used_at + SETTLE_SECONDS

    def note_use(self, now: float) -> None:
        """Note that it is used, or has just begun to serve; no answer counts any more."""
        self._used_at = max(self._used_at, now)
        self._answer_by = None

    def note_shards(self, rows: Iterable[Counters]) -> None:
        """Note when the shards had something to do last, which they write."""
        latest = max((row[Field.HEARTBEAT] for row in rows), default=0)
        self._used_at = max(self._used_at, latest / MICROSECONDS)

    def ask(self, shards: Iterable[Child], now: float) -> None:
        """Ask shards whether they are used."""
        self._asked, self._answer_by = set(), now + ANSWER_SECONDS
        for child in shards:
            self._asked.add(child.index)
            with contextlib.suppress(OSError):  # it is exiting, and does not answer
                send_message(child.link, Message({IS_USED: True}))

    def note_answer(self, child: Child, now: float, *, is_used: bool) -> None:
        """Note what a shard has answered."""
        if is_used:
            self.note_use(now)
        else:
            self._asked.discard(child.index)

    def give_up(self, now: float) -> None:
        """Take for used what has not answered in time."""
        if self._answer_by is not None and now >= self._answer_by:
            self.note_use(now)


def has_sessions(row: Counters) -> bool:
    """Whether a shard has a session, or a client that may want one."""
    return bool(row.load or row[Field.WAITING])
