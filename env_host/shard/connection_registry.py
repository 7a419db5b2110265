# SPDX-License-Identifier: Apache-2.0
"""`Guard`: lets the host know which connections have sessions, so that it can speak for the dead;
and which have not been answered, so that it can give them to another shard.

    a session begins ──▶ a copy of its socket's descriptor ──▶ host, which keeps it
    it ends          ──▶ its token                         ──▶ host, which closes the copy
    we die           ──▶ the host writes each a last word, and closes

    one is accepted     ──▶ such a copy                    ──▶ host, which keeps it
    it begins to wait, or comes from another shard
                        ──▶ the same, and what was read    ──▶ host, which keeps both
    it is answered, or another's ──▶ its token             ──▶ host, which forgets it
    we die              ──▶ the host hands it over to another shard, which knows no difference;
                            unless the kernel says that we answered it, or read more of it

What happens in one turn of the loop goes in one message, save what must be said before somebody
else could answer: a connection that two shards answer is lost. One is not over before the host has
closed its copy; that is a matter of microseconds, unless the host is forking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from ..ipc.fd_messages import MAX_FDS, Message, Post, close_all, copy_all
from ..sessions.table import Attached, Session
from .acceptor import MOST_CARRIED_BYTES, Arrival, duplicate
from .request_head import Owner, new_session_id


class Guard:
    """The `Hooks` of a shard's session table."""

    def __init__(self, link: Post, owner: Owner, on_count: Callable[[], None]) -> None:
        self._link = link
        self._owner = owner
        self._on_count = on_count
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._tokens: dict[str, int] = {}  # by session
        # Those that were not answered: their tokens, and how many bytes of each the host has.
        self._arrivals: dict[Arrival, tuple[int, int]] = {}
        self._begun: dict[int, tuple[int, str]] = {}  # not told yet: descriptor, path
        self._ended: list[int] = []
        self._is_due = False
        self._count = 0
        self._is_over = asyncio.Event()

    def new_id(self) -> str:
        return new_session_id(self._owner)

    def on_change(self, count: int) -> None:
        self._count = count
        self._look_if_over()
        self._on_count()
        self._tell_soon()

    def on_begin(self, session: Session, socket: Attached) -> None:
        if socket.transport is None or (fd := duplicate(socket.transport)) is None:
            return
        token = self._tokens[session.id] = next(self._numbers)
        self._begun[token] = fd, getattr(socket, "path", "/ws")
        self._tell_soon()

    def on_end(self, session: Session) -> None:
        token = self._tokens.pop(session.id, None)
        self._look_if_over()
        if token is None:
            return
        if token in self._begun:  # the host has never heard of it
            close_all(self._begun.pop(token)[:1])
        else:
            self._ended.append(token)
            self._tell_soon()

    def accepted(self, arrivals: Sequence[tuple[Arrival, int]]) -> None:
        """These have come, with these descriptors, which stay the caller's."""
        for start in range(0, len(arrivals), MAX_FDS):
            part = arrivals[start : start + MAX_FDS]
            copies = copy_all([fd for _, fd in part])  # maybe of fewer: the rest goes without
            tokens = [next(self._numbers) for _ in copies]
            for (arrival, _), token in zip(part, tokens, strict=False):
                self._arrivals[arrival] = token, 0
            if copies:
                self._link.send(Message({"accepted": tokens}, fds=copies))

    def adopted(self, arrival: Arrival, fd: int) -> None:
        """Another process has given it to us, with this descriptor, which stays the caller's."""
        self._tell_of(arrival, copy_all([fd]))

    def waits(self, arrival: Arrival) -> None:
        """It does from now on, and nothing of it has been answered."""
        _, known_bytes = self._arrivals.get(arrival, (0, 0))
        if len(arrival.data) != known_bytes and (fd := duplicate(arrival.transport)) is not None:
            self._tell_of(arrival, (fd,))

    def answering(self, arrival: Arrival) -> None:
        """It is about to be answered, or has left."""
        if (told := self._arrivals.pop(arrival, None)) is not None:
            self._ended.append(told[0])
            self._tell_soon()

    def giving(self, arrival: Arrival) -> None:
        """It is about to be another process's, which may answer at once."""
        if (told := self._arrivals.pop(arrival, None)) is not None:
            self._link.send(Message({"ended": [told[0]]}))

    async def until_over(self) -> None:
        """Wait until there is no session, and none has a connection."""
        await self._is_over.wait()

    def flush(self) -> None:
        """Tell what there is to tell."""
        self._is_due = False
        begun, self._begun = list(self._begun.items()), {}
        ended, self._ended = self._ended, []
        for start in range(0, len(begun) or 1, MAX_FDS):
            part = begun[start : start + MAX_FDS]
            head: dict[str, Any] = {"begun": [[token, path] for token, (_, path) in part]}
            if not start:
                head |= {"ended": ended, "sessions": self._count}
            self._link.send(Message(head, fds=tuple(fd for _, (fd, _) in part)))

    def _tell_of(self, arrival: Arrival, copies: tuple[int, ...]) -> None:
        """What was read of it is the host's to give away, should we die."""
        if len(arrival.data) > MOST_CARRIED_BYTES or not copies:
            close_all(copies)
            return
        token, _ = self._arrivals.get(arrival) or (next(self._numbers), 0)
        self._arrivals[arrival] = token, len(arrival.data)
        head = {"waits": token, "since": arrival.since}
        self._link.send(Message(head, bytes(arrival.data), copies))

    def _look_if_over(self) -> None:
        if self._count or self._tokens:
            self._is_over.clear()
        else:
            self._is_over.set()

    def _tell_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)
