# SPDX-License-Identifier: Apache-2.0
"""`LiveState`: entities by kind and id, rendered once, and their changes for each viewer.

`Source` is the interface of the classes that read a part of the daemon.

`Feed`: keeps `LiveState` up to date while a page is open.

    first viewer ──▶ run(): a first turn, then one after events and one each tick
    last viewer leaves ──▶ run() ends, and all entities are dropped: an idle daemon does nothing

Between two turns is a pause, so that many events are one change. A turn yields to the loop after
each source.

A snapshot taken during a turn shows the end of the turn before, which the next change updates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import orjson
from fastapi.sse import ServerSentEvent

from ...requests_db.records import Event
from ..api.dependencies import Dependencies
from ..api.streams import sse
from .followed_log import FollowedLog

MAX_WAITING_CHARACTERS = 1_000_000  # for one viewer that does not read


class Viewer:
    """The messages that one open page has not been sent yet."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.needs_snapshot = True
        self._waiting: list[ServerSentEvent] = []
        self._size = 0

    def put(self, message: ServerSentEvent) -> None:
        """Keep a change for the viewer; one that has stopped reading gets a snapshot instead."""
        self.wake.set()
        if self.needs_snapshot:
            return
        self._waiting.append(message)
        self._size += len(message.raw_data or "")
        if self._size > MAX_WAITING_CHARACTERS:
            self.needs_snapshot = True
            self.take()

    def take(self) -> list[ServerSentEvent]:
        """Everything that waits, oldest first."""
        taken, self._waiting, self._size = self._waiting, [], 0
        return taken


class LiveState:
    """The entities that the page shows. Putting an entity as it was is no change."""

    def __init__(self) -> None:
        self._entities: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._sent: dict[str, dict[str, bytes]] = {}  # as of the last flush
        self._viewers: set[Viewer] = set()
        self._is_filled = False

    @property
    def has_viewers(self) -> bool:
        """Return whether a page is open."""
        return bool(self._viewers)

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Count a page as open within the block."""
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def put(self, kind: str, entity_id: str, entity: Any) -> None:
        """Add an entity, or replace it."""
        self._entities[kind][entity_id] = orjson.dumps(entity)

    def replace(self, kind: str, entities: Mapping[str, Any]) -> None:
        """Make these the only entities of a kind."""
        self._entities[kind] = {key: orjson.dumps(entity) for key, entity in entities.items()}

    def flush(self) -> None:
        """Give every viewer what has changed since the last time."""
        put: dict[str, dict[str, bytes]] = {}
        dropped: dict[str, list[str]] = {}
        for kind, now in self._entities.items():
            before = self._sent.get(kind, {})
            if changed := {key: text for key, text in now.items() if before.get(key) != text}:
                put[kind] = changed
            if gone := sorted(before.keys() - now.keys()):
                dropped[kind] = gone
            self._sent[kind] = now.copy()
        self._is_filled = True
        if not put and not dropped:
            return
        message = _event("change", put, dropped)
        for viewer in self._viewers:
            viewer.put(message)

    def messages_for(self, viewer: Viewer) -> list[ServerSentEvent]:
        """Return what to send to a viewer: changes or a snapshot; nothing before a flush."""
        if not viewer.needs_snapshot:
            return viewer.take()
        if not self._is_filled:
            return []
        viewer.needs_snapshot = False
        return [_event("snapshot", self._sent, {})]

    def clear(self) -> None:
        """Drop everything, and wake the viewers, which get a snapshot when there is one again."""
        for viewer in self._viewers:
            viewer.needs_snapshot = True
            viewer.wake.set()
        self._entities.clear()
        self._sent.clear()
        self._is_filled = False


@dataclass(frozen=True, slots=True)
class Turn:
    """The reason for which the sources are refreshed."""

    now: float  # since the epoch
    events: tuple[Event, ...] = ()  # since the last turn
    is_tick: bool = False  # a second has passed
    is_first: bool = False  # look at everything: nothing is known, or events were dropped

    def has(self, kind: str) -> bool:
        """Return whether such an event has happened, or may have."""
        return self.is_first or any(event.kind == kind for event in self.events)


class Source(Protocol):
    """Reads parts of the daemon, and puts their present state as entities."""

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Put what has changed."""


def _event(
    name: str, put: Mapping[str, Mapping[str, bytes]], dropped: Mapping[str, list[str]]
) -> ServerSentEvent:
    fragments = {
        kind: {entity_id: orjson.Fragment(text) for entity_id, text in entities.items()}
        for kind, entities in put.items()
    }
    return sse(name, {"at": time.time(), "put": fragments, "drop": dropped})


TICK_SECONDS = 0.7  # between two reads of what no event announces, such as the death of a shard
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
        """A snapshot, then changes and a log's text; with `is_look`, what there is by now."""
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
                    with anyio.move_on_after(tick - time.monotonic()):
                        await subscription.wake.wait()
                    is_tick = time.monotonic() >= tick
                    tick = time.monotonic() + TICK_SECONDS if is_tick else tick
                    is_lagged, subscription.lagged = subscription.lagged, False
                    subscription.wake.clear()
                    events, is_tick = tuple(subscription.take()), is_tick or is_lagged
                    turn = Turn(time.time(), events, is_tick=is_tick, is_first=is_lagged)
                    await self._turn(sources, turn)
        finally:
            self._task = None
            self._state.clear()

    async def _turn(self, sources: Sequence[Source], turn: Turn) -> None:
        for source in sources:
            try:
                await source.refresh(self._state, turn)
            except Exception:  # a defect costs one panel only
                name = type(source).__name__
                if name not in self._failed:
                    log.exception("the dashboard's %s failed; what it shows stays", name)
                self._failed.add(name)
            await asyncio.sleep(0)
        self._state.flush()
