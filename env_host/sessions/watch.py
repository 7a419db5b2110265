# SPDX-License-Identifier: Apache-2.0
"""Watches the sessions of one process for silent clients, calls that hang, and idleness.

`SessionWatch` is one task for all sessions, since a timer for each would cost more than a waiting
session does; it sleeps while there is no session. It pings a client that has sent nothing for a
round, and closes the connection of one that has not answered by the next. It logs a call that lasts
very long, again each time the call has lasted twice as long. It ends sessions that nothing has used
for a limited time; those that were begun over HTTP and forgotten have a limit of their own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...system.net.websocket import GOING_AWAY_CLOSE
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
    """Pings silent clients, logs hung calls, ends idle sessions. On the event loop only."""

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
        limit = min(table.idle_seconds, table.unattached_seconds)
        idle_look_seconds = max(limit / 4, MIN_IDLE_LOOK_SECONDS)
        self._look_seconds = min(LOOK_SECONDS, round_seconds, hung_seconds, idle_look_seconds)
        self._next_log: dict[str, float] = {}  # by session: how long its call lasts by then

    async def run(self) -> None:
        """Look at all sessions again and again while there are any; never returns."""
        loop = asyncio.get_running_loop()
        next_round = 0.0
        while True:
            if not self._table.occupied.is_set():
                await self._table.occupied.wait()
                next_round = loop.time() + self._round_seconds
            await asyncio.sleep(self._look_seconds)
            is_round = loop.time() >= next_round
            if is_round:
                next_round = loop.time() + self._round_seconds
            await self._look(is_round=is_round)

    async def _look(self, *, is_round: bool) -> None:
        loop = asyncio.get_running_loop()
        sessions = list(self._table)
        self._next_log = {each.id: self._next_log.get(each.id, 0.0) for each in sessions}
        forgotten = 0
        for number, session in enumerate(sessions, 1):
            self._log_hung(session, loop.time())
            if is_round and session.socket is not None:
                session.socket.check_liveness()
            forgotten += self._end_idle(session, loop.time())
            if number % SESSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if forgotten:
            text = "%d sessions without a WebSocket ended: nothing had used them for %g s"
            log.warning(text, forgotten, self._table.unattached_seconds)

    def _log_hung(self, session: Session, now: float) -> None:
        seconds = now - session.call_began
        if not session.busy or not session.call_name or seconds < self._hung_seconds:
            self._next_log[session.id] = 0.0
        elif seconds >= self._next_log[session.id]:
            self._next_log[session.id] = seconds * 2
            text = "session %s: %s has not returned for %.0f s"
            extra = {"session": session.id}
            log.warning(text, session.id, session.call_name, seconds, extra=extra)

    def _end_idle(self, session: Session, now: float) -> bool:
        """End a session that was idle for too long; True: it was begun over HTTP and forgotten."""
        seconds, limit = 0.0 if session.busy else now - session.last_used, self._table.idle_seconds
        if session.socket is None:
            # Not while its environment is being created.
            is_forgotten = seconds > self._table.unattached_seconds and session.calls is not None
            if is_forgotten or seconds > limit:
                self._table.release(session)
            return is_forgotten
        if seconds > limit:
            text = f"The session was idle for more than {limit:g} s."
            session.socket.end(SessionEnded(text, GOING_AWAY_CLOSE))
        return False
