# SPDX-License-Identifier: Apache-2.0
"""`IsolatedSessions`: the host's side of sessions that have processes of their own.

    front ──a connection to isolate──▶ `begin` ──a free slot──▶ process (`starting.py`)
      ▲                                  │ none: its last session is over, its process is not
      │                                  └──▶ waits ──one ends──▶ `begin_next`
      ├──of a session that is there────▶ `pass_on` ──▶ its process
      └──how many are over────────────── `tell_front`

The front (shard 0) counts them: it has let a connection in before it comes here. A slot is free
when the session is over (`free_slot`), before its process has ended: the client may be back by
then.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque

from ...system.descriptors import Message, close_all, send_message
from ..ipc.scoreboard import Counters, Field, Scoreboard
from . import close_notices
from .children import Child, Children
from .spawn import Starter

LINGERING = 16  # processes of isolated sessions that are over, and have not ended

log = logging.getLogger("openenvd.env_host")


def slots_for(sessions: int) -> int:
    """How many on the board: a session's slot is free before its process has ended."""
    return 2 * sessions + LINGERING


class IsolatedSessions:
    """Makes their processes, and knows which are over."""

    def __init__(self, scoreboard: Scoreboard, children: Children, starter: Starter) -> None:
        self._scoreboard = scoreboard
        self._children = children
        self._starter = starter
        self._waiting: deque[Message] = deque()  # connections to isolate, without a slot yet
        self._over = 0  # of which the front has not been told

    def __len__(self) -> int:
        """Those that the front is to count."""
        held = sum(each.is_isolated and each.holds_slot for each in self._children)
        return held + len(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether the front has not been told of all that are over."""
        return self._over > 0

    @property
    def fds(self) -> list[int]:
        """Of the connections that wait."""
        return [fd for message in self._waiting for fd in message.fds]

    def begin(self, message: Message) -> Child | None:
        """A process for the session of one connection; None: it waits, or is refused."""
        if not message.fds:  # we had no descriptor left to receive it
            log.warning("a session was lost: the host has too few file descriptors (ulimit -n)")
            self._over += 1
            return None
        if (counters := self._free_slot()) is None:
            self._waiting.append(message)  # for a process whose session is over to end
            return None
        try:
            new = self._starter.isolated(message, counters)
        except OSError as exc:
            log.warning("a session has no process, its client is refused: %s", exc)
            text = f"There is no room for the process of another session: {exc.strerror}."
            close_notices.say_before_handshake(message.fds[0], text)
            self._over += 1
            return None
        if message.head.get("http"):  # the front's question, not the session's connection
            os.close(message.fds[0])
            new.connection_fd = None
        return new

    def begin_next(self) -> Child | None:
        """A process for who waits, if anybody does; after one has ended."""
        return self.begin(self._waiting.popleft()) if self._waiting else None

    def pass_on(self, message: Message) -> None:
        """A connection that is for a session which has its process already."""
        to = self._children.at(message.head["for"])
        if to is not None:
            with contextlib.suppress(OSError):
                send_message(to.link, message)
        close_all(message.fds)

    def free_slot(self, child: Child) -> None:
        """Its session is over, or its process has ended, whichever is heard of first."""
        if child.is_isolated and child.holds_slot:
            child.holds_slot = False
            self._over += 1

    def tell_front(self) -> None:
        """Slots are free again; again later, should the front be too slow to hear it now."""
        front = self._children.at(0) if self._over else None
        if front is None:
            return  # its successor is told the number that there are
        with contextlib.suppress(OSError):
            if not send_message(front.link, Message({"isolated_ended": self._over})):
                return
        self._over = 0

    def mark_told(self) -> None:
        """A new front knows how many there are."""
        self._over = 0

    def cancel(self) -> None:
        """Nobody waits any more."""
        close_all(self.fds)
        self._waiting.clear()

    def _free_slot(self) -> Counters | None:
        shards = self._scoreboard.shards
        free = (
            counters
            for counters in self._scoreboard
            if counters.index >= shards and not counters[Field.PID]
        )
        return next(free, None)
