# SPDX-License-Identifier: Apache-2.0
"""Bounds what one process keeps of messages that have not arrived whole, of all clients together.

One message may be long, and a client may take its time. Without this bound a few hundred clients
that each send most of a message, and then wait, take all memory.

    more than `most_bytes` are kept         whose message goes on is not read for a while (held), so
                                            that one other's, which goes on too, becomes whole
    no message becomes whole for a while    one more is read, then two more, then four, ..., as far
                                            as one and a half times as much; after `STALL_SECONDS`
                                            there, the one of which most is kept is closed, 1013
    twice as much                           the one of which most is kept is closed at once, 1013

More and more are read because a connection may wait for the kernel, whose receive buffers the held
ones fill. It is slow: 1,024 clients that send 2 MB each in one instant to a process that may keep
400 MB need up to a minute, or are closed. So the bound is a share of the memory that there is
(`environment/plan.py`), and no less than `MESSAGES_AT_ONCE` messages. Clients that send short
messages, which arrive whole, are never concerned.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from ...schema.protocol import MAX_MESSAGE_BYTES
from ...system.net.websocket import TRY_AGAIN_LATER_CLOSE
from ...system.text.units import MB

if TYPE_CHECKING:
    from .protocol import WebSocketProtocol

MESSAGES_AT_ONCE = 4  # of the greatest length may have arrived in part
STALL_SECONDS = 10.0  # without a message that became whole
LOOK_SECONDS = 0.25  # while connections are held


class PartialMessages:
    """What is kept for each connection of one process. On the event loop only."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES, most_bytes: int = 0) -> None:
        self.max_message_bytes = max_message_bytes
        self._most_bytes = max(most_bytes, MESSAGES_AT_ONCE * max_message_bytes)
        self._kept: dict[WebSocketProtocol, int] = {}
        self._total = 0
        self._held: dict[WebSocketProtocol, None] = {}  # of these; the first is read again first
        self._going_on: set[WebSocketProtocol] = set()  # the others that sent since the last look
        self._timer: asyncio.TimerHandle | None = None  # while any is held
        self._is_any_whole = False  # has become so since the last look
        self._stalled_looks = 0
        self._more = 1  # to be read at the next look if none became whole

    def note(self, connection: WebSocketProtocol, size: int) -> None:
        """Take note of how many bytes are kept for a connection, and make room if need be."""
        self._total += size - self._kept.pop(connection, 0)
        if size:
            self._kept[connection] = size
            self._going_on.add(connection)
        else:
            self._is_any_whole = True
            self._going_on.discard(connection)
            self._read_again(connection)
        if self._total > 2 * self._most_bytes:
            self._close_largest()
        elif size and self._total > self._most_bytes:
            self._hold(connection)
        elif self._held:
            self._read_next()

    def is_held(self, connection: WebSocketProtocol) -> bool:
        """Whether the connection is not read for a while, to the others' benefit."""
        return connection in self._held

    def _hold(self, connection: WebSocketProtocol) -> None:
        if connection not in self._held and len(self._going_on) > 1:
            self._going_on.discard(connection)
            self._held[connection] = None
            connection.hold_reading()
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _read_next(self) -> None:
        """Read from one more, if there is room, or if no other goes on."""
        if self._total <= self._most_bytes or not self._going_on:
            self._read_again(next(iter(self._held)))

    def _read_again(self, connection: WebSocketProtocol) -> None:
        if connection in self._held:
            del self._held[connection]
            connection.resume_reading()

    def _look(self) -> None:
        """Let more go on, twice as many each time, until a message becomes whole."""
        self._timer = None
        self._stalled_looks = 0 if self._is_any_whole else self._stalled_looks + 1
        if self._is_any_whole:
            self._more = max(1, self._more // 2)
        elif self._total < 1.5 * self._most_bytes:
            for connection in list(islice(self._held, self._more)):
                self._read_again(connection)
            self._more *= 2
        elif self._stalled_looks * LOOK_SECONDS >= STALL_SECONDS:
            self._close_largest()
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        self._is_any_whole = False
        self._going_on.clear()

    def _close_largest(self) -> None:
        """Close the one of which most is kept; failing, it notes that nothing is."""
        largest = max(self._kept, key=self._kept.__getitem__)
        text = f"unfinished messages take {self._total // MB} MB"
        largest.guarded(largest.fail, TRY_AGAIN_LATER_CLOSE, text)
