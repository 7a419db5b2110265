# SPDX-License-Identifier: Apache-2.0
"""`LiveState`: entities by kind and id, rendered once, and what changed of them for each viewer.

`Source` is what the feed asks of what reads a part of the daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi.sse import ServerSentEvent

from ...requests_db.records import Event
from ..api.streams import sse

MAX_WAITING_CHARACTERS = 1_000_000  # for one viewer that does not read


class Viewer:
    """What one open page has not been sent yet."""

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
    """What the page shows. An entity that is put as it was is no change."""

    def __init__(self) -> None:
        self._entities: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._put: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._dropped: defaultdict[str, set[str]] = defaultdict(set)
        self._viewers: set[Viewer] = set()
        self._snapshot: ServerSentEvent | None = None  # until something changes
        self._is_filled = False

    @property
    def has_viewers(self) -> bool:
        """Whether somebody looks."""
        return bool(self._viewers)

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Somebody who looks, within the block."""
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def wake_all(self) -> None:
        """Wake every viewer: the daemon stops."""
        for viewer in self._viewers:
            viewer.wake.set()

    def put(self, kind: str, entity_id: str, entity: Any) -> None:
        """Add an entity, or replace it."""
        rendered = orjson.dumps(entity)
        if self._entities[kind].get(entity_id) != rendered:
            self._entities[kind][entity_id] = self._put[kind][entity_id] = rendered
            self._dropped[kind].discard(entity_id)

    def put_new(self, kind: str, entity_id: str, entity: Any) -> None:
        """Add an entity, unless there is one of this id already."""
        if entity_id not in self._entities[kind]:
            self.put(kind, entity_id, entity)

    def drop(self, kind: str, entity_id: str) -> None:
        """Forget an entity; one that is not known is no change."""
        if self._entities[kind].pop(entity_id, None) is not None:
            self._put[kind].pop(entity_id, None)
            self._dropped[kind].add(entity_id)

    def replace(self, kind: str, entities: Mapping[str, Any]) -> None:
        """Make these the only entities of a kind."""
        for gone in self._entities[kind].keys() - entities.keys():
            self.drop(kind, gone)
        for entity_id, entity in entities.items():
            self.put(kind, entity_id, entity)

    def flush(self) -> None:
        """Give every viewer what has changed since the last time."""
        put = {kind: changed for kind, changed in self._put.items() if changed}
        dropped = {kind: sorted(gone) for kind, gone in self._dropped.items() if gone}
        self._is_filled = True
        if not put and not dropped:
            return
        message = _event("change", put, dropped)
        self._put.clear()
        self._dropped.clear()
        self._snapshot = None
        for viewer in self._viewers:
            viewer.put(message)

    def messages_for(self, viewer: Viewer) -> list[ServerSentEvent]:
        """What to send to a viewer now: changes, or a snapshot; nothing before the first flush."""
        if not viewer.needs_snapshot:
            return viewer.take()
        if not self._is_filled:
            return []
        viewer.needs_snapshot = False
        if self._snapshot is None:  # once for all who need it
            self._snapshot = _event("snapshot", self._entities, {})
        return [self._snapshot]

    def clear(self) -> None:
        """Forget everything; who looks gets a snapshot when there is one again."""
        for viewer in self._viewers:
            viewer.needs_snapshot = True
        for each in (self._entities, self._put, self._dropped):
            each.clear()
        self._snapshot = None
        self._is_filled = False


@dataclass(frozen=True, slots=True)
class Turn:
    """Why the sources are asked to look."""

    now: float  # since the epoch
    events: tuple[Event, ...] = ()  # since the last turn
    is_tick: bool = False  # a second has passed
    is_first: bool = False  # look at everything: nothing is known, or events were dropped

    def has(self, kind: str) -> bool:
        """Whether such an event has happened, or may have."""
        return self.is_first or any(event.kind == kind for event in self.events)


class Source(Protocol):
    """Reads parts of the daemon, and puts what they are now as entities."""

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
