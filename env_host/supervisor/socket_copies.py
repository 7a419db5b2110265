# SPDX-License-Identifier: Apache-2.0
"""`HeldSockets`: the host's copies of its children's connections, for when one of them dies.

    begun: has a session   ──▶ held        its client is told of the death (`last_words`)
    accepted, or waits     ──▶ unanswered  goes on in another shard, mostly (`unanswered.py`)
    ended, answered, given ──▶ let go      it is the child's alone to end

What a child says of its connections: `guard.py`. Descriptors are few: beyond the bounds below no
copy is kept, and such a client sees only the end of its connection when its process dies.
"""

from __future__ import annotations

import os
from typing import Any

from ..ipc.fd_messages import Message
from ..ipc.scoreboard import now_microseconds
from . import close_notices
from .children import Child
from .orphaned_connections import Unanswered


class HeldSockets:
    """All copies, of all children. A token is a child's name of a connection."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_unanswered = most // 2  # the rest is for sessions
        self._count = 0

    def take_in(self, speaker: Child, message: Message) -> None:
        """Keep and let go what a child says has been accepted, waits, has begun, has ended."""
        head = message.head
        if "accepted" in head:
            self._keep_accepted(speaker, head["accepted"], message.fds)
        elif "waits" in head:
            self._keep_waiting(speaker, message)
        else:
            self._hold(speaker, head.get("begun", ()), message.fds)
            for token in head.get("ended", ()):
                self._let_go(speaker, token)

    def take_unanswered(self, dead: Child) -> list[Unanswered]:
        """What it had not answered, the oldest first; theirs to close who takes them."""
        taken = sorted(dead.unanswered.values(), key=lambda connection: connection.since)
        self._count -= len(taken)
        dead.unanswered.clear()
        return taken

    def speak_for(self, dead: Child, text: str) -> None:
        """Tell all of its clients, and let them go."""
        for fd, path in dead.held.values():
            close_notices.say(fd, path, text)
        self._count -= len(dead.held)
        dead.held.clear()
        if dead.connection_fd is not None:
            close_notices.say_before_handshake(dead.connection_fd, text)
            dead.connection_fd = None

    def _keep_accepted(self, speaker: Child, tokens: list[int], fds: tuple[int, ...]) -> None:
        now = now_microseconds()
        for token, fd in zip(tokens, fds, strict=False):
            self._keep(speaker, token, Unanswered(fd, now))

    def _keep_waiting(self, speaker: Child, message: Message) -> None:
        """In place of what was kept of it when it had been accepted."""
        token, since = message.head["waits"], message.head["since"]
        self._let_go(speaker, token)
        for fd in message.fds:
            self._keep(speaker, token, Unanswered(fd, since, message.body))

    def _keep(self, speaker: Child, token: int, connection: Unanswered) -> None:
        if self._count >= self._most_unanswered:
            os.close(connection.fd)
            return
        self._count += 1
        speaker.unanswered[token] = connection

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
        elif token in speaker.unanswered:
            fd = speaker.unanswered.pop(token).fd
        else:
            return
        self._count -= 1
        os.close(fd)
