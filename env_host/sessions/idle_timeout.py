# SPDX-License-Identifier: Apache-2.0
"""Ends sessions that nobody uses, telling those who are connected."""

from __future__ import annotations

import asyncio

from ..errors import SessionEnded
from .table import SessionTable

GOING_AWAY_CLOSE = 1001
MIN_REAP_SECONDS = 1.0


async def reap_idle(table: SessionTable, limit_seconds: float) -> None:
    """End sessions that nobody has used for `limit_seconds`; never returns."""
    loop = asyncio.get_running_loop()
    text = f"The session was idle for more than {limit_seconds:g} s."
    while True:
        await asyncio.sleep(max(limit_seconds / 4, MIN_REAP_SECONDS))
        for session in table.idle(loop.time(), limit_seconds):
            if session.socket is not None:
                session.socket.end(SessionEnded(text, GOING_AWAY_CLOSE))
            else:
                await table.close(session)
