# SPDX-License-Identifier: Apache-2.0
"""Which environments are to be settled, as the events tell; one after another for each of them.

    bus ──follow──▶ name ──▶ due ──▶ the environment's one task ──▶ settle(name)
            │              ▲  ▲
            │              │  └─ the database refused: again after a pause
            └─ events were dropped: all names

An environment that is settled while it becomes due again is settled once more, never twice at a
time. One whose settling takes long (stopping does) keeps no other waiting. What is done is
`reconciler.py`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from ...requests_db.async_store import AsyncStore
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Event
from ..events.bus import EventBus, Subscription
from .background_tasks import BackgroundTasks
from .decisions import DECISIVE
from .status_writer import RETRY_SECONDS, insist

log = logging.getLogger(__name__)

SETTLED_SECONDS = 0.2  # most that a look at environments waits for what is just being written


class Settle(Protocol):
    """Does what is due for an environment."""

    async def __call__(self, name: str, *, adopt: bool) -> None: ...


class WorkQueue:
    """Has environments settled."""

    def __init__(
        self, store: AsyncStore, bus: EventBus, tasks: BackgroundTasks, settle: Settle
    ) -> None:
        self._store = store
        self._bus = bus
        self._tasks = tasks
        self._settle = settle
        # What is to be settled (again); whether its launch has started a replica.
        self._due: dict[str, bool] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}  # the task that does

    async def follow(self) -> None:
        """Settle what events are about, until cancelled."""
        with self._bus.subscribe() as subscription:
            while True:
                for event in await subscription.next():
                    self._on_event(event)
                if subscription.lagged:
                    await self._make_up(subscription)

    async def settled(self, name: str | None = None) -> None:
        """Wait until what has been heard of an environment, or of all, is in the tables.

        Whoever has been told that a launch succeeded must not find it STARTING. Not for long:
        stopping takes its time, and is told as it stands.
        """
        tasks = [task for known, task in self._settling.items() if name in (None, known)]
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLED_SECONDS)

    def _on_event(self, event: Event) -> None:
        if event.environment is None:
            return
        if event.kind == "request.state":
            if event.request is None or event.request.operation in DECISIVE:
                self._settle_soon(event.environment)
        elif event.kind == "request.progress" and "replica" in event.data:
            self._settle_soon(event.environment, adopt=True)

    async def _make_up(self, subscription: Subscription) -> None:
        """Events were dropped: what they told is in the tables."""
        subscription.lagged = False  # before the tables are read
        names = await insist(self._store.names)
        for name in names:
            self._settle_soon(name, adopt=True)

    def _settle_soon(self, name: str, *, adopt: bool = False) -> None:
        self._due[name] = adopt or self._due.get(name, False)
        if name not in self._settling:
            self._settling[name] = self._tasks.spawn(self._settle_while_due(name), f"settle {name}")

    async def _settle_while_due(self, name: str) -> None:
        try:
            while name in self._due:
                await self._try_to_settle(name, adopt=self._due.pop(name))
        finally:
            del self._settling[name]

    async def _try_to_settle(self, name: str, *, adopt: bool) -> None:
        try:
            await self._settle(name, adopt=adopt)
        except DatabaseError as exc:
            extra = {"environment": name}
            log.warning("cannot settle %s, trying again: %s", name, exc, extra=extra)
            self._due[name] = adopt or self._due.get(name, False)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            log.exception("cannot settle %s", name, extra={"environment": name})
