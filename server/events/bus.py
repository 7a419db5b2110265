# SPDX-License-Identifier: Apache-2.0
"""`EventBus`: hands events to subscribers; nothing in the daemon polls the database.

    dispatcher thread ──publish_from_thread──▶ loop ──▶ EventBus ──▶ Subscription (one per waiter)
    API, reconciler   ──publish────────────────┘

A subscription holds what has arrived and not yet been taken. It is bounded: a client that does not
read loses its place (`lagged`), must reconnect, and resumes from the database with
`Last-Event-ID`; the daemon's memory stays bounded. Everything here runs on the loop, except
`publish_from_thread`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...requests_db.records import Event

MAX_WAITING_EVENTS = 10_000


class Subscription:
    """The events that one waiter has not taken yet. `wake` is set when there are any."""

    def __init__(self, most_waiting: int) -> None:
        self.wake = asyncio.Event()
        self.lagged = False
        self._events: deque[Event] = deque()
        self._most_waiting = most_waiting

    def put(self, event: Event) -> None:
        """Keep the event for the waiter, unless it has stopped reading."""
        if len(self._events) >= self._most_waiting:
            self.lagged = True
        else:
            self._events.append(event)
        self.wake.set()

    def take(self) -> list[Event]:
        """Everything that has arrived, oldest first."""
        taken = list(self._events)
        self._events.clear()
        return taken

    async def next(self) -> list[Event]:
        """Wait until something arrives, and take it; nothing, when all are woken."""
        await self.wake.wait()
        self.wake.clear()
        return self.take()


class EventBus:
    """Hands every event to the subscriptions that want it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, most_waiting: int = MAX_WAITING_EVENTS
    ) -> None:
        self._loop = loop
        self._most_waiting = most_waiting  # events of one subscription
        # By request id for the many short-lived waiters; None holds all others.
        self._subscriptions: dict[str | None, list[Subscription]] = {None: []}

    @contextmanager
    def subscribe(self, *, request_id: str | None = None) -> Iterator[Subscription]:
        """A subscription to one request, or to everything."""
        subscription = Subscription(self._most_waiting)
        self._subscriptions.setdefault(request_id, []).append(subscription)
        try:
            yield subscription
        finally:
            waiters = self._subscriptions[request_id]
            waiters.remove(subscription)
            if request_id is not None and not waiters:
                del self._subscriptions[request_id]

    def publish(self, events: Sequence[Event]) -> None:
        """Hand events out; on the loop only."""
        for event in events:
            for key in {event.request_id, None}:
                for subscription in self._subscriptions.get(key, ()):
                    subscription.put(event)

    def wake_all(self) -> None:
        """Wake every subscription: the daemon stops."""
        for waiters in self._subscriptions.values():
            for subscription in waiters:
                subscription.wake.set()

    def publish_from_thread(self, events: Sequence[Event]) -> None:
        """Hand events out, from any thread; drop them when the loop has closed."""
        if not events:
            return
        try:
            self._loop.call_soon_threadsafe(self.publish, events)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
