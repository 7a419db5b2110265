# SPDX-License-Identifier: Apache-2.0
"""What the executor has to tell, until the end of a round of the supervisor.

    other threads ──notify──▶ notices ──take_notices──┐
    supervisor thread ───────────────────────────add──┴▶ events ──┐
                      ──────────────────────────add_room─▶ freed ─┴─tell──▶ on_event

No lock: the notices are a deque, whose ends may be used by two threads at once; all else is the
supervisor thread's. `on_event` is called without the pools' lock, and may call the executor.
"""

from __future__ import annotations

import logging
from collections import deque

from ..messages import EventSink, ExecutorEvent, RoomFreed

log = logging.getLogger(__name__)


class Outbox:
    """Events in their order; after them, in which pools there is room again."""

    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self._notices: deque[ExecutorEvent] = deque()
        self._events: list[ExecutorEvent] = []
        self._freed: set[str] = set()

    def notify(self, event: ExecutorEvent) -> None:
        """Have it told, before anything that a worker says later. Any thread."""
        self._notices.append(event)

    def take_notices(self) -> None:
        """Put what other threads have to tell behind what is here."""
        while self._notices:
            self._events.append(self._notices.popleft())

    def add(self, event: ExecutorEvent) -> None:
        """Have it told at the end of the round."""
        self._events.append(event)

    def add_room(self, schedule: str) -> None:
        """A task of that schedule is over."""
        self._freed.add(schedule)

    def tell(self) -> None:
        """Empty it; a listener that fails misses one event."""
        events, self._events = self._events, []
        events.extend(RoomFreed(schedule) for schedule in self._freed)
        self._freed.clear()
        for event in events:
            try:
                self._on_event(event)
            except Exception:
                log.exception("the executor's listener failed on %s", type(event).__name__)
