# SPDX-License-Identifier: Apache-2.0
"""`LiveState`: entities by kind and id, rendered once, and their changes for each viewer.

`Feed`: keeps `LiveState` up to date while a page is open.

    first viewer ──▶ run(): a first turn, then one after events and one each tick
    last viewer leaves ──▶ run() ends, and all entities are dropped: an idle daemon does nothing

Between two turns is a pause, so that many events are one change. A turn yields to the loop after
each source.

A snapshot taken during a turn shows the end of the turn before, which the next change updates.

`FollowedLog`: the log that a page shows, on the page's one stream.

    open_log(deps, "requests/ID")        what a request printed, until it is final
    open_log(deps, "environments/NAME")  what the youngest replica prints; when it no longer serves,
                                         the log of the replica that is then the youngest

The log begins with its last lines, and continues as lines are written (`events.py`). A page that
comes back states its last offset, and is sent the text after it. If there is too much text to send,
the log begins again with the newest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import orjson
from fastapi.sse import ServerSentEvent

from ...requests_db.records import Event
from ..api.dependencies import Dependencies
from ..api.routes_environments import POLL_INTERVAL_SECONDS, shown_log
from ..api.streams import request_ends, sse
from ..errors import ApiError
from ..events import LogFile, followed, offset_of_last_lines

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
        self._sent: dict[str, dict[str, bytes]] = {}  # as of the last flush; empty before
        self.viewers: set[Viewer] = set()  # one for each open page

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Count a page as open within the block."""
        viewer = Viewer()
        self.viewers.add(viewer)
        try:
            yield viewer
        finally:
            self.viewers.discard(viewer)

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
        if not put and not dropped:
            return
        message = _event("change", put, dropped)
        for viewer in self.viewers:
            viewer.put(message)

    def messages_for(self, viewer: Viewer) -> list[ServerSentEvent]:
        """Return what to send to a viewer: changes or a snapshot; nothing before a flush."""
        if not viewer.needs_snapshot:
            return viewer.take()
        if not self._sent:
            return []
        viewer.needs_snapshot = False
        return [_event("snapshot", self._sent, {})]

    def clear(self) -> None:
        """Drop everything, and wake the viewers, which get a snapshot when there is one again."""
        for viewer in self.viewers:
            viewer.needs_snapshot = True
            viewer.wake.set()
        self._entities.clear()
        self._sent.clear()


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


FIRST_LINES = 5000
MAX_BEHIND_BYTES = 8_000_000  # the most that is sent at once; of more, only the newest


class FollowedLog:
    """One log, as events of the stream; until `show`, there is no file.

    Args:
        end: Done when nothing more is written.
        place: `FILE:OFFSET` of the last event that the page has received; empty if none.
    """

    def __init__(self, end: asyncio.Future[Any], place: str = "") -> None:
        self._log: LogFile | None = None
        self._end = end
        self._had, _, offset = place.rpartition(":")
        self._had_to = int(offset or 0)
        self._is_first = not self._had

    @property
    def file(self) -> str:
        """The name of the shown file, or of the one that the page had before it came back."""
        return self._log.path.name if self._log else self._had

    async def show(self, path: Path, lines: int) -> None:
        """Continue in this file, or begin with its last lines."""
        offset = await asyncio.to_thread(offset_of_last_lines, path, lines)
        self._is_first = self.file != path.name or self._had_to < offset
        self._log = LogFile(path, offset if self._is_first else self._had_to)

    def messages(self) -> Iterator[ServerSentEvent]:
        """Yield what was written since the last call, in whole lines; at the end, all of it.

        The first event has `is_first`: the page must discard its earlier text.
        """
        log = self._log
        if log is not None and log.skip(MAX_BEHIND_BYTES):
            self._is_first = True
        if self._is_first:
            self._is_first = False
            yield _log_event("", log, is_first=True)
        if log is not None:
            is_over = self._end.done()
            for text in log.pieces(final=is_over):
                yield _log_event(text, log)


@asynccontextmanager
async def open_log(
    deps: Dependencies, name: str, place: str, wake: asyncio.Event
) -> AsyncIterator[FollowedLog]:
    """Open the log `requests/ID` or `environments/NAME`; set `wake` when there is more of it.

    It is empty if the request is unknown, or the environment has printed nothing. For `place` see
    `FollowedLog`.
    """
    kind, _, key = name.partition("/")
    async with AsyncExitStack() as stack:
        ends: Callable[[], Coroutine[Any, Any, object]] = deps.stopping.wait
        path = None
        with suppress(ApiError):
            if kind == "requests":
                request = await deps.submitter.find(key)
                path = deps.paths.request_log(request.id)
                ends = partial(request_ends, deps, request)
        end = asyncio.create_task(ends())
        end.add_done_callback(lambda _: wake.set())
        stack.callback(end.cancel)
        log = FollowedLog(end, place)
        if path is not None:
            await log.show(path, FIRST_LINES)
            stack.enter_context(followed(path, wake))
        elif kind == "environments":
            opened = asyncio.Event()
            showing = asyncio.create_task(_show_what_serves(deps, key, log, wake, opened))
            stack.callback(showing.cancel)
            await opened.wait()
        yield log


async def _show_what_serves(
    deps: Dependencies, name: str, log: FollowedLog, wake: asyncio.Event, opened: asyncio.Event
) -> None:
    """Follow the log of a serving replica, and of another one when it stops serving."""
    path: Path | None = None
    with ExitStack() as following:
        while True:
            try:
                with suppress(ApiError):
                    environment = await deps.submitter.environment(name)
                    found = await shown_log(deps, environment, log.file)
                    if found is not None and found != path:
                        path = found
                        await log.show(path, FIRST_LINES)
                        following.close()
                        following.enter_context(followed(path, wake))
                        wake.set()
            finally:
                opened.set()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def _log_event(text: str, log: LogFile | None, *, is_first: bool = False) -> ServerSentEvent:
    place = f"{log.path.name}:{log.offset}" if log else ""
    return sse("log", {"text": text, "is_first": is_first, "place": place})


TICK_SECONDS = 0.7  # between two reads of what no event announces, such as the death of a shard
PAUSE_SECONDS = 0.25  # between two turns, however much happens

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
        self, log: str | None = None, place: str = "", *, is_look: bool = False
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield a snapshot, then changes and a log's text; if `is_look`, only the present ones."""
        async with AsyncExitStack() as stack:
            viewer = stack.enter_context(self._state.viewer())
            shown = None
            if log is not None:
                opened = open_log(self._deps, log, place, viewer.wake)
                shown = await stack.enter_async_context(opened)
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="dashboard")
            yield ServerSentEvent(comment="listening")
            while not self._deps.stopping.is_set():
                viewer.wake.clear()
                for message in self._state.messages_for(viewer):
                    yield message
                for message in shown.messages() if shown else ():
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
                while self._state.viewers and not self._deps.stopping.is_set():
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
