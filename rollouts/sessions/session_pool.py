# SPDX-License-Identifier: Apache-2.0
"""The sessions that are open, and whose turn it is.

A session that played an episode to its end serves the next one: `reset` begins anew, and neither
a connection nor an environment has to be made. One in which something went wrong is dropped.

A server without room for another session is no failure while sessions of ours are what fills it:
then the next one that is given back goes to whoever waits.

Neither is one that has answered before and is gone: a replica that died is replaced within seconds.
In these an episode that asks again and again would have used up all of its attempts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable

from ..episodes import FailureReason
from ..errors import EpisodeFailed
from .message_memory import MessageMemory
from .session import CONNECT_SECONDS, Session
from .wire import Receiving

PAUSE_SECONDS = 1.0  # before asking a full server again that others fill, or one that is gone
LEAVE_AT_ONCE = 8
GOOD_BYE_SECONDS = 1.0  # at the end, for what a server is slow to read
RETURN_SECONDS = 30.0  # for so long a server that is gone is waited for, by all together


class SessionPool:
    """Idle sessions by address, at most `most` of them; and those who wait for one."""

    def __init__(
        self,
        most: int,
        memory: MessageMemory,
        *,
        reuse: bool,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        self._most = most
        self._reuse = reuse
        self._connect_seconds = connect_seconds
        self._receiving = Receiving(memory)
        self._answered: set[str] = set()
        self._gone_since: dict[str, float] = {}
        self._idle: dict[str, list[Session]] = defaultdict(list)
        self._in_use: dict[str, set[Session]] = defaultdict(set)
        self._leaving: set[Session] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = defaultdict(deque)

    async def take(self, address: str, *, fresh: bool = False) -> tuple[Session, bool]:
        """A session, and whether it has served an episode before.

        Raises:
            EpisodeFailed: NOT_CONNECTED, NO_CAPACITY.
        """
        idle = self._idle[address]
        while idle and not fresh:
            session = idle.pop()
            if session.is_open:
                self._in_use[address].add(session)
                return session, True
            session.abort()
        self._make_room()
        session = await Session.open(address, self._receiving, self._connect_seconds)
        self._answered.add(address)
        self._gone_since.pop(address, None)
        self._in_use[address].add(session)
        return session, False

    def give_back(self, address: str, session: Session) -> None:
        """The episode ended well."""
        self._in_use[address].discard(session)
        if self._reuse and session.is_open:
            self._idle[address].append(session)
        else:
            self._leave(session)
        self._wake(address)

    def drop(self, address: str, session: Session) -> None:
        """Something went wrong in it."""
        self._in_use[address].discard(session)
        session.abort()
        self._wake(address)

    async def wait_for_room(self, address: str) -> bool:
        """Until one of our sessions there is given back; False when none of them is in the way."""
        if self._idle[address]:
            return True
        if not self._in_use[address]:
            await asyncio.sleep(PAUSE_SECONDS)
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[address].append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake(address)  # whoever is next takes the turn
            raise
        return True

    async def wait_for_return(self, address: str) -> bool:
        """A while, after nobody answered; False where nobody ever did, or for too long."""
        if address not in self._answered:
            return False
        now = time.monotonic()
        if now - self._gone_since.setdefault(address, now) >= RETURN_SECONDS:
            return False
        await asyncio.sleep(PAUSE_SECONDS)
        return True

    async def close(self) -> None:
        """Let go of all of them. None is left behind, also when this is cancelled."""
        _abort(self._in_use.values())
        try:
            await self._leave_idle()
            if self._leaving:
                leaving = [session.ended for session in self._leaving]
                await asyncio.wait(leaving, timeout=GOOD_BYE_SECONDS)
        finally:
            _abort([*self._idle.values(), self._leaving])

    async def _leave_idle(self) -> None:
        """A few in each turn of the loop: all of 256 took 13 ms."""
        for number in itertools.count(1):
            if not (sessions := next(filter(None, self._idle.values()), None)):
                return
            self._leave(sessions.pop())
            if number % LEAVE_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _make_room(self) -> None:
        """Of several environments, those that idle give way."""
        idle = sum(map(len, self._idle.values()))
        if idle and idle + sum(map(len, self._in_use.values())) >= self._most:
            self._leave(max(self._idle.values(), key=len).pop())

    def _leave(self, session: Session) -> None:
        """It is gone when what it says as it leaves has been sent."""
        session.close()
        self._leaving.add(session)
        session.ended.add_done_callback(lambda _: self._leaving.discard(session))

    def _wake(self, address: str) -> None:
        waiting = self._waiting[address]
        while waiting:
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _abort(sessions: Iterable[Collection[Session]]) -> None:
    for session in itertools.chain.from_iterable(sessions):
        session.abort()


def is_for_want_of_room(exc: EpisodeFailed) -> bool:
    """Whether the server would have answered, had it had room."""
    return exc.reason is FailureReason.NO_CAPACITY
