# SPDX-License-Identifier: Apache-2.0
"""Looks after the sessions of one process: who is still there, and whose call hangs.

One task for all sessions, since a timer for each would cost more than the sessions themselves do
while they wait. Who has said nothing for a round is asked (a ping, as uvicorn sends them), and who
has not answered by the next round is given up. A call that lasts very long is told of in the log,
again each time it has lasted twice as long. When the last session has gone, free memory goes, too.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from ..startup import malloc_tuning
from ..websocket.protocol import WebSocketProtocol
from .table import Session, SessionTable

ROUND_SECONDS = 20.0  # uvicorn's `ws_ping_interval`
LOOK_SECONDS = 5.0
HUNG_SECONDS = 60.0
MOST_AT_ONCE = 500  # sessions, before others have their turn

log = logging.getLogger("openenvd.env_host")


class SessionWatch:
    """What is remembered between two looks. On the event loop only."""

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
        self._had_sessions = False
        self._told: dict[str, float] = {}  # by session: when its call is told of next

    async def run(self) -> None:
        """Look, again and again."""
        loop = asyncio.get_running_loop()
        next_round = loop.time() + self._round_seconds
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self._round_seconds, self._hung_seconds))
            is_round = loop.time() >= next_round
            if is_round:
                next_round = loop.time() + self._round_seconds
            await self._look(is_round=is_round)

    async def _look(self, *, is_round: bool) -> None:
        loop = asyncio.get_running_loop()
        here = list(self._table)
        if self._had_sessions and not here:
            malloc_tuning.give_back()
        self._had_sessions = bool(here)
        self._told = {session.id: self._told.get(session.id, 0.0) for session in here}
        for number, session in enumerate(here, 1):
            self._tell_if_hung(session, loop.time())
            if is_round and isinstance(socket := cast(object, session.socket), WebSocketProtocol):
                socket.ask_for_life()
            if number % MOST_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _tell_if_hung(self, session: Session, now: float) -> None:
        seconds = now - session.call_began
        told = self._told[session.id]
        if not session.busy or not session.call_name or seconds < self._hung_seconds:
            self._told[session.id] = 0.0
        elif seconds >= told:
            self._told[session.id] = seconds * 2
            log.warning("session %s: %s runs since %.0f s", session.id, session.call_name, seconds)
