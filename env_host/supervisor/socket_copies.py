# SPDX-License-Identifier: Apache-2.0
"""`HeldSockets`: the host's copies of its children's connections, for when one of them dies.

What a child says of its connections: `shard/connection_registry.py`. Descriptors are few: beyond
the bound below no copy is kept, and such a client sees only the end of its connection.
"""

from __future__ import annotations

import os
from typing import Any

from ...system.descriptors import Message
from . import close_notices
from .children import Child


class HeldSockets:
    """All copies, of all children. A token is a child's name of a connection."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def take_in(self, speaker: Child, message: Message) -> None:
        """Keep the copies of sessions that have begun, close those of sessions that have ended."""
        self._hold(speaker, message.head.get("begun", ()), message.fds)
        for token in message.head.get("ended", ()):
            self._let_go(speaker, token)

    def speak_for(self, dead: Child, text: str) -> None:
        """Tell all of its clients, and let them go."""
        for fd, path in dead.held.values():
            close_notices.say(fd, path, text)
        self._count -= len(dead.held)
        dead.held.clear()
        if dead.connection_fd is not None:
            close_notices.say_before_handshake(dead.connection_fd, text)
            dead.connection_fd = None

    def _hold(self, speaker: Child, begun: list[Any], fds: tuple[int, ...]) -> None:
        for (token, path), fd in zip(begun, fds, strict=False):
            if self._count >= self._most:
                os.close(fd)
                continue
            self._count += 1
            speaker.held[token] = fd, path
        if begun and fds and speaker.connection_fd is not None:
            os.close(speaker.connection_fd)
            speaker.connection_fd = None

    def _let_go(self, speaker: Child, token: int) -> None:
        if token in speaker.held:
            fd, _ = speaker.held.pop(token)
            self._count -= 1
            os.close(fd)
