# SPDX-License-Identifier: Apache-2.0
"""`StateLink`: the connection of a shard to the state process, for the shard's whole life.

It connects again when the state process was replaced. A `World` is bound to the connection of its
first call, and never to a later one: what its session did is in the state that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from .connection import Connection, open_connection
from .errors import WorldError, WorldLost
from .limits import DEFAULT_LIMITS, Limits

log = logging.getLogger("openenvd.env_host")


class StateLink:
    """The connection of a shard to the current state process."""

    def __init__(
        self,
        address: str,
        shard: str,
        on_lost: Callable[[WorldLost], None] = lambda lost: None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._address = address
        self._shard = shard
        self.on_lost = on_lost
        self._connection: Connection | None = None
        self._changed = asyncio.Event()  # a new one with each connection
        self._again: asyncio.Task[None] | None = None
        self._closed = False
        self.loop = asyncio.get_running_loop()

    async def connect(self) -> None:
        """Connect for the first time.

        Raises:
            WorldError: There is no state process.
        """
        self._connect_again()
        await self.current(time.monotonic() + self._limits.connect_seconds)

    async def current(self, deadline: float) -> Connection:
        """Return the connection, or wait for the next one.

        Raises:
            WorldError: There was none before the deadline.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                while self._connection is None and not self._closed:
                    await self._changed.wait()
        if self._connection is None:
            raise WorldError("The process that holds the shared state cannot be reached.")
        return self._connection

    @property
    def connection(self) -> Connection | None:
        """The connection, if there is one now."""
        return self._connection

    async def close(self) -> None:
        """Close the connection, and do not connect again."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait({self._again})
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed.wait()
        self._announce()

    def _connect_again(self) -> None:
        self._again = self.loop.create_task(self._reconnect(), name="shared-state-connect")

    async def _reconnect(self) -> None:
        while not self._closed:
            try:
                self._connection = await open_connection(
                    self._address, self._shard, self._lost, self._limits
                )
            except (OSError, TimeoutError, WorldLost) as exc:
                log.debug("shared state: not connected: %s", exc)
                await asyncio.sleep(self._limits.retry_seconds)
            else:
                self._announce()
                return

    def _lost(self, lost: WorldLost) -> None:
        if self._connection is None:  # it was never welcomed: `_reconnect` is at it
            return
        self._connection = None
        if not self._closed:
            self._connect_again()
            self.on_lost(lost)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def connect_state(
    address: str,
    shard: str,
    on_lost: Callable[[WorldLost], None] = lambda lost: None,
    limits: Limits = DEFAULT_LIMITS,
) -> StateLink:
    """Connect a shard to the state process; `on_lost` is called each time a connection is lost.

    When there is no state process now, it is not waited for long: sessions wait for it.
    """
    link = StateLink(address, shard, on_lost, limits)
    with contextlib.suppress(WorldError):
        await link.connect()
    return link
