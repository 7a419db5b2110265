# SPDX-License-Identifier: Apache-2.0
"""`Feed`: keeps `LiveState` up to date while somebody looks.

    first viewer ──▶ run(): a first turn, then one after events and one each tick
    last viewer leaves ──▶ run() ends, and what it knew is forgotten: an idle daemon does nothing

Between two turns is a pause, so that many events are one change. A turn yields to the loop after
each source.

A snapshot in the middle of a turn has what the turn has put so far, and the change at its end
has it again: entities are whole, so that does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from fastapi.sse import ServerSentEvent

from ..api.dependencies import Dependencies
from ..events.bus import Subscription
from .followed_log import FollowedLog
from .live_state import LiveState, Source, Turn

TICK_SECONDS = 0.7  # between two looks at what no event tells of, such as the death of a shard
PAUSE_SECONDS = 0.25  # between two turns, however much happens

# A log, opened for a viewer whose event is set when there is more of it.
LogOf = Callable[[asyncio.Event], AbstractAsyncContextManager[FollowedLog]]

log = logging.getLogger(__name__)


class Feed:
    """The entities that all viewers are sent."""

    def __init__(self, deps: Dependencies, make_sources: Callable[[], Sequence[Source]]) -> None:
        self._deps = deps
        self._make_sources = make_sources
        self._state = LiveState()
        self._task: asyncio.Task[None] | None = None
        self._failed: set[str] = set()  # sources whose failure was logged

    async def messages(
        self, log_of: LogOf | None = None, *, is_look: bool = False
    ) -> AsyncIterator[ServerSentEvent]:
        """A viewer's stream: a snapshot, then changes, until the daemon ends; with a log's text.

        A look ends with the snapshot, and what there is of the log by then.
        """
        async with AsyncExitStack() as stack:
            viewer = stack.enter_context(self._state.viewer())
            followed = await stack.enter_async_context(log_of(viewer.wake)) if log_of else None
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="dashboard")
            yield ServerSentEvent(comment="listening")
            while not self._deps.stopping.is_set():
                viewer.wake.clear()
                for message in self._state.messages_for(viewer):
                    yield message
                for message in followed.messages() if followed else ():
                    yield message
                if is_look and not viewer.needs_snapshot:
                    return
                await viewer.wake.wait()

    async def _run(self) -> None:
        sources = self._make_sources()
        try:
            with self._deps.bus.subscribe() as subscription:
                await self._turn(sources, Turn(time.time(), is_tick=True, is_first=True))
                tick = time.monotonic() + TICK_SECONDS
                while self._state.has_viewers and not self._deps.stopping.is_set():
                    await asyncio.sleep(PAUSE_SECONDS)
                    await _is_set_within(subscription.wake, tick - time.monotonic())
                    is_tick = time.monotonic() >= tick
                    tick = time.monotonic() + TICK_SECONDS if is_tick else tick
                    await self._turn(sources, _turn_of(subscription, is_tick=is_tick))
        finally:
            self._task = None
            self._state.clear()
            self._state.wake_all()

    async def _turn(self, sources: Sequence[Source], turn: Turn) -> None:
        for source in sources:
            try:
                await source.refresh(self._state, turn)
            except Exception:  # a defect, of one panel alone
                name = type(source).__name__
                if name not in self._failed:
                    log.exception("the dashboard's %s failed; what it shows stays", name)
                self._failed.add(name)
            await asyncio.sleep(0)
        self._state.flush()


def _turn_of(subscription: Subscription, *, is_tick: bool) -> Turn:
    is_lagged, subscription.lagged = subscription.lagged, False
    subscription.wake.clear()
    events = tuple(subscription.take())
    return Turn(time.time(), events, is_tick=is_tick or is_lagged, is_first=is_lagged)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    return event.is_set()
