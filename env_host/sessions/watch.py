# SPDX-License-Identifier: Apache-2.0
"""Watches the sessions of one process for silent clients, calls that hang, and idleness.

`SessionWatch` is one task for all sessions, since a timer for each would cost more than a waiting
session does. It pings a client that has sent nothing for a round, and closes the connection of one
that has not answered by the next round. It logs a call that lasts very long, again each time the
call has lasted twice as long. It sleeps while there is no session.

`close_idle_sessions` runs only where sessions may be idle for a limited time. `UnattachedExpiry`
ends the sessions that were begun over HTTP and forgotten; it has a timer only while there are such.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...system.websocket import GOING_AWAY_CLOSE
from ..errors import SessionEnded

if TYPE_CHECKING:
    from .session import Session
    from .table import SessionTable

ROUND_SECONDS = 20.0  # uvicorn's `ws_ping_interval`
LOOK_SECONDS = 5.0
HUNG_SECONDS = 60.0
SESSIONS_AT_ONCE = 500  # before other tasks have their turn
MIN_IDLE_LOOK_SECONDS = 1.0

log = logging.getLogger("openenvd.env_host")


class SessionWatch:
    """Pings silent clients and logs hung calls. On the event loop only."""

    def __init__(
        self,
        table: SessionTable,
        *,
        round_seconds: float = ROUND_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        self._table = table
        self._round_seconds = round_seconds
        self._hung_seconds = hung_seconds
        self._next_log: dict[str, float] = {}  # by session: how long its call lasts by then

    async def run(self) -> None:
        """Look at all sessions again and again while there are any; never returns."""
        loop = asyncio.get_running_loop()
        next_round = 0.0
        while True:
            if not self._table.occupied.is_set():
                await self._table.occupied.wait()
                next_round = loop.time() + self._round_seconds
            await asyncio.sleep(min(LOOK_SECONDS, self._round_seconds, self._hung_seconds))
            is_round = loop.time() >= next_round
            if is_round:
                next_round = loop.time() + self._round_seconds
            await self._look(is_round=is_round)

    async def _look(self, *, is_round: bool) -> None:
        loop = asyncio.get_running_loop()
        sessions = list(self._table)
        self._next_log = {each.id: self._next_log.get(each.id, 0.0) for each in sessions}
        for number, session in enumerate(sessions, 1):
            self._log_hung(session, loop.time())
            if is_round and session.socket is not None:
                session.socket.check_liveness()
            if number % SESSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _log_hung(self, session: Session, now: float) -> None:
        seconds = now - session.call_began
        if not session.busy or not session.call_name or seconds < self._hung_seconds:
            self._next_log[session.id] = 0.0
        elif seconds >= self._next_log[session.id]:
            self._next_log[session.id] = seconds * 2
            text = "session %s: %s has not returned for %.0f s"
            extra = {"session": session.id}
            log.warning(text, session.id, session.call_name, seconds, extra=extra)


async def close_idle_sessions(table: SessionTable, limit_seconds: float) -> None:
    """End the sessions that nothing has used for `limit_seconds`; never returns."""
    loop = asyncio.get_running_loop()
    text = f"The session was idle for more than {limit_seconds:g} s."
    while True:
        await table.occupied.wait()
        await asyncio.sleep(max(limit_seconds / 4, MIN_IDLE_LOOK_SECONDS))
        for session in table.idle(loop.time(), limit_seconds):
            if session.socket is not None:
                session.socket.end(SessionEnded(text, GOING_AWAY_CLOSE))
            else:
                await table.close(session)


class UnattachedExpiry:
    """Ends the sessions without a WebSocket that nothing uses any more. On the event loop only."""

    def __init__(self, table: SessionTable, limit_seconds: float) -> None:
        self._table = table
        self._limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # None: there is no such session

    def note(self) -> None:
        """Take note that a session has just been begun or left without a WebSocket."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_seconds, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        due = [(self._due(each, now), each) for each in self._table if each.socket is None]
        expired = [session for when, session in due if when <= now]
        for session in expired:
            self._table.release(session)
        if expired:
            text = "%d sessions without a WebSocket ended: nothing had used them for %g s"
            log.warning(text, len(expired), self._limit_seconds)
        left = [when for when, _ in due if when > now]
        self._timer = None
        if left:
            next_look = max(min(left), now + MIN_IDLE_LOOK_SECONDS)
            self._timer = self._loop.call_at(next_look, self._look)

    def _due(self, session: Session, now: float) -> float:
        """Return when the session expires, as far as is known by now."""
        is_in_use = session.busy or session.calls is None  # or its environment is being created
        return (now if is_in_use else session.last_used) + self._limit_seconds
