# SPDX-License-Identifier: Apache-2.0
"""What the reconciler observed: written to the database, then told to the bus.

    set_environment, set_replica ──▶ a guarded update ──▶ its event, if anything changed ──▶ bus

The database may refuse for a while (a full disk). Whoever must not lose what was observed says
`insist`; a step that is taken again anyway (`settling.py`) need not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...requests_db.async_store import AsyncStore
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Replica, RequestError
from ...requests_db.states import EnvironmentState
from ..events.bus import EventBus

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0


class StatusWriter:
    """Writes and tells."""

    def __init__(self, store: AsyncStore, bus: EventBus) -> None:
        self._store = store
        self._bus = bus

    async def set_environment(
        self,
        name: str,
        state: EnvironmentState,
        *,
        address: str | None = None,
        error: RequestError | None = None,
    ) -> None:
        """How an environment is."""
        event = await self._store.set_environment_state(
            name, state, address=address, error=error, now=time.time()
        )
        if event is None:
            return
        self._bus.publish([event])
        level = logging.WARNING if error is not None else logging.INFO
        why = "" if error is None else f": {error.message}"
        extra = {"environment": name, "state": state.value}
        log.log(level, "environment %s is %s%s", name, state.value, why, extra=extra)

    async def set_replica(self, replica: Replica) -> None:
        """How a replica is."""
        event = await self._store.upsert_replica(replica, now=time.time())
        if event is None:
            return
        self._bus.publish([event])
        state = replica.state.value
        extra = {"replica": replica.id, "environment": replica.environment, "state": state}
        log.info("replica %s is %s", replica.id, state, extra=extra | {"pid": replica.pid})


async def insist(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `work` returns, as soon as the database lets it."""
    while True:
        try:
            return await work()
        except DatabaseError as exc:
            log.warning("a status cannot be written, trying again: %s", exc)
            await asyncio.sleep(RETRY_SECONDS)
