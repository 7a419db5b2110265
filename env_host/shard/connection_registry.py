# SPDX-License-Identifier: Apache-2.0
"""`ConnectionRegistry`: tells the supervisor which connections have sessions.

    a session begins ──▶ a copy of its socket's descriptor ──▶ supervisor, which keeps it
    it ends          ──▶ its token                         ──▶ supervisor, which closes the copy
    this process exits ▶ the supervisor sends each client a notice, and closes

What happens in one iteration of the loop goes in one message. A connection is not over before the
supervisor has closed its copy: microseconds later, unless it is forking. Copies are made when they
can be sent: in a crowd those that wait would take all descriptors.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from ...system.process.descriptors import MAX_FDS, Message
from ..ipc.fd_messages import MessageChannel, duplicate
from ..sessions.session import Attached, Session
from .arrivals import Owner, new_session_id

FULL_SECONDS = 0.02  # until it is tried again to send what the supervisor has had no room for


class ConnectionRegistry:
    """The hooks of a shard's session table: reports which sockets have sessions."""

    def __init__(self, link: MessageChannel, owner: Owner, on_count: Callable[[], None]) -> None:
        self._link = link
        self._owner = owner
        self._on_count = on_count
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._tokens: dict[str, int] = {}  # by session
        self._begun: dict[int, Attached] = {}  # not reported yet
        self._ended: list[int] = []
        self._is_due = False
        self._count = 0
        self._is_over = asyncio.Event()

    def new_id(self) -> str:
        """Return a new session id that names this process."""
        return new_session_id(self._owner)

    def on_change(self, count: int) -> None:
        """Take note of the number of sessions."""
        self._count = count
        self._check_if_over()
        self._on_count()
        self._flush_soon()

    def on_begin(self, session: Session, socket: Attached) -> None:
        """Report a session and a copy of its socket."""
        token = self._tokens[session.id] = next(self._numbers)
        self._begun[token] = socket
        self._flush_soon()

    def on_end(self, session: Session) -> None:
        """Report that a session has ended."""
        token = self._tokens.pop(session.id, None)
        self._check_if_over()
        if token is None:
            return
        if self._begun.pop(token, None) is None:  # otherwise the supervisor has not heard of it
            self._ended.append(token)
            self._flush_soon()

    async def until_over(self) -> None:
        """Wait until there is no session, and none has a connection."""
        await self._is_over.wait()

    def flush(self) -> None:
        """Report what has begun and ended since the last report."""
        self._is_due = False
        ended, self._ended = self._ended, []
        self._send(ended=ended, sessions=self._count)
        while self._begun and not self._link.is_full:
            self._send()
        if self._begun:
            self._is_due = True
            self._loop.call_later(FULL_SECONDS, self.flush)

    def _send(self, **head: Any) -> None:
        begun = [] if self._link.is_full else list(itertools.islice(self._begun.items(), MAX_FDS))
        copies = []
        for token, socket in begun:
            del self._begun[token]
            if (fd := duplicate(socket.transport)) is not None:
                copies.append((token, socket.path, fd))
        head["begun"] = [[token, path] for token, path, _ in copies]
        self._link.send(Message(head, fds=tuple(fd for _, _, fd in copies)))

    def _check_if_over(self) -> None:
        if self._count or self._tokens:
            self._is_over.clear()
        else:
            self._is_over.set()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)
