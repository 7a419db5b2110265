# SPDX-License-Identifier: Apache-2.0
"""`IsolatedSession`: the process of one session, which the supervisor forks for its connection.

supervisor ──connection, and what was read of it──▶ Arrival ──▶ the session, and the end with it
supervisor ──link: connections for it later──▶ Arrival
"""

from __future__ import annotations

import asyncio

from ...system.descriptors import Message
from .arrivals import accepted_as_bytes
from .base import ServingProcess

LEAVING_LOOK_SECONDS = 0.05  # at a session whose client may have gone
BEGIN_SECONDS = 30.0  # for it to begin


class IsolatedSession(ServingProcess):
    """Serves one session, and exits with it."""

    async def run(self, head: bytes) -> None:
        """Serve the connection until it is over, or the process is asked to stop."""
        await self.start()
        fd = self._own.connection_fd
        assert fd is not None
        accepted = accepted_as_bytes(self._own.accepted)
        arrival = await self.arrivals.open(fd, self._own.since, head, accepted)
        watching = asyncio.create_task(self._watch(arrival.transport), name="watch-connection")
        stopping = asyncio.create_task(self._stopping.wait(), name="wait-for-signal")
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        stopping.cancel()
        await self.stop()

    async def _watch(self, transport: asyncio.BaseTransport | None) -> None:
        """Return when the session is over, or the connection without having begun one.

        A session that was begun over HTTP has no connection of its own.
        """
        async with asyncio.timeout(BEGIN_SECONDS) as patience:
            while len(self.table) or not (transport is None or transport.is_closing()):
                if len(self.table):
                    patience.reschedule(None)
                    await self.registry.until_over()
                await asyncio.sleep(LEAVING_LOOK_SECONDS)

    def _on_link(self, message: Message) -> None:
        """Take over a connection for the session that the front has accepted."""
        if not message.fds:
            return
        accepted = accepted_as_bytes(message.head.get("accepted"))
        self._take_connection(message.fds[0], message.head["since"], message.body, accepted)

    def _other_owner(self, session_id: str) -> int:
        return 0
