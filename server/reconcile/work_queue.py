# SPDX-License-Identifier: Apache-2.0
"""`WorkQueue`: the environments that have to be reconciled, and the task that does it for each.

    bus ──follow──▶ name ──▶ due ──▶ the environment's one task ──▶ reconcile(name)
            │              ▲  ▲
            │              │  └─ the database or the system refused: again after a pause
            └─ events were dropped: all names

An environment that becomes due while it is reconciled is reconciled once more, never twice at a
time. An environment that takes long (stopping does) does not delay another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...requests_db.async_store import AsyncStore
from ...requests_db.errors import DatabaseError
from ...requests_db.sql import queries
from ...requests_db.transactions.journal import REQUEST_STATE
from ..events import EventBus
from .decisions import DECISIVE
from .status_writer import RETRY_SECONDS, StatusWriter

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.2  # most that a reader waits for states that are just being written


class BackgroundTasks:
    """The tasks of one owner, which nothing awaits, and which it ends all at once.

    The loop itself holds a task only weakly: they are held here until they have ended, and an
    error that ended one is logged.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return task

    async def end(self) -> None:
        """Cancel all; returns when they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("%s has ended: %s", task.get_name(), exc, exc_info=exc)


@dataclass(eq=False)
class WorkQueue:
    """Owns the names that are due, and the tasks that reconcile them."""

    store: AsyncStore
    bus: EventBus
    tasks: BackgroundTasks
    status: StatusWriter
    reconcile: Callable[[str], Coroutine[Any, Any, None]]  # takes a name
    _due: set[str] = field(init=False, default_factory=set)  # names
    _running: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)  # by name

    async def follow(self) -> None:
        """Reconcile what events are about, until cancelled."""
        with self.bus.subscribe() as subscription:
            while True:
                for event in await subscription.next():
                    is_due = event.request is None or event.request.operation in DECISIVE
                    if event.environment and event.kind == REQUEST_STATE and is_due:
                        self.add(event.environment)
                if subscription.lagged:  # events were dropped; their contents are in the tables
                    subscription.lagged = False  # before the tables are read
                    read = partial(self.store.read, queries.NAMES)
                    for name in await self.status.insist("read the environments", read):
                        self.add(name)

    async def wait(self, name: str | None = None) -> None:
        """Wait until the tables reflect the events about an environment, or about all.

        A client that saw a launch succeed must not find its environment STARTING. The
        wait is short: an environment that is stopping takes longer, and is shown as it is.
        """
        tasks = [task for known, task in self._running.items() if name in (None, known)]
        if tasks:
            await asyncio.wait(tasks, timeout=WAIT_SECONDS)

    def add(self, name: str) -> None:
        """Reconcile the environment soon."""
        self._due.add(name)
        if name not in self._running:
            self._running[name] = self.tasks.spawn(self._run(name), f"reconcile {name}")

    async def _run(self, name: str) -> None:
        try:
            while name in self._due:
                self._due.discard(name)
                await self._try(name)
        finally:
            del self._running[name]

    async def _try(self, name: str) -> None:
        extra = {"environment": name}
        try:
            await self.reconcile(name)
        except (DatabaseError, OSError) as exc:
            log.warning("cannot reconcile %s, trying again: %s", name, exc, extra=extra)
            self._due.add(name)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            log.exception("cannot reconcile %s", name, extra=extra)
