# SPDX-License-Identifier: Apache-2.0
"""Bounds what one process keeps of messages that have not arrived whole, of all clients together.

One message may be long, and a client may take its time. Without this bound a few hundred clients
that each send most of a message, and then wait, take all memory.

When there is too much, the connection of which most is kept is closed with 1013: that frees most at
the price of one client, and clients that send short messages are never concerned. A message that
has just become whole takes two to three times its size for a moment more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...system.units import MB
from ...system.websocket import TRY_AGAIN_LATER_CLOSE
from ..protocol import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from .protocol import WebSocketProtocol

MESSAGES_AT_ONCE = 4  # of the greatest length may have arrived in part


class PartialMessages:
    """What is kept for each connection of one process. On the event loop only."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_message_bytes = max_message_bytes
        self._most_bytes = MESSAGES_AT_ONCE * max_message_bytes
        self._kept: dict[WebSocketProtocol, int] = {}
        self._total = 0

    def note(self, connection: WebSocketProtocol, size: int) -> None:
        """Take note of how many bytes are kept for a connection, and make room if need be."""
        self._total += size - self._kept.pop(connection, 0)
        if size:
            self._kept[connection] = size
        while self._total > self._most_bytes:  # a connection that fails notes that nothing is kept
            largest = max(self._kept, key=self._kept.__getitem__)
            text = f"unfinished messages take more than {self._most_bytes // MB} MB"
            largest.guarded(largest.fail, TRY_AGAIN_LATER_CLOSE, text)
