# SPDX-License-Identifier: Apache-2.0
"""Streams events and log lines to waiting clients, as they happen.

    bus ──▶ Subscription.wake ─┐
    a followed log ────────────┼─▶ one asyncio.Event ─▶ a turn: new text of the log, then new events
    daemon stops ──────────────┘

Every item carries `<event seq>:<log offset>` as its id, so that a client that comes back with
`Last-Event-ID` continues where it was, whatever happened in between. A stream of one request ends
by itself after the final state and the last byte of the log.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from fastapi import Query
from fastapi.sse import ServerSentEvent

from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Event, Request
from ...requests_db.sql import queries
from ...requests_db.transactions.journal import REQUEST_PROGRESS, REQUEST_STATE
from ...schema.states import RequestState
from ...system.files.log_files import offset_since
from ..events import LogFile, followed, offset_of_last_lines
from .dependencies import Dependencies
from .views import event_view, request_view

WAIT_SECONDS = 15.0  # for a request that is followed, before it is looked up again
PAGE = 1000  # events read at once
NEWEST = 20  # events of a request, among which its last report is looked for
TAIL = Query(ge=0, description="Start with this many lines from the end.")
SINCE = Query(ge=0, description="Start with what was printed this many seconds ago.")
TEXT = "text/plain; charset=utf-8"


@dataclass(slots=True)
class Position:
    """The place up to which a client has read."""

    seq: int = 0
    log_offset: int = 0

    @classmethod
    def parse(cls, last_event_id: str | None) -> Position:
        """From `Last-Event-ID`; the beginning when it is absent or not ours."""
        match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", last_event_id or "")
        return cls(int(match[1]), int(match[2])) if match else cls()


def sse(event: str, data: Any, position: Position | None = None) -> ServerSentEvent:
    """One event of a stream; with a position, a client may continue after it."""
    place = None if position is None else f"{position.seq}:{position.log_offset}"
    return ServerSentEvent(event=event, raw_data=orjson.dumps(data).decode(), id=place)


async def wait_until_final(deps: Dependencies, request_id: str, seconds: float) -> Request:
    """The request once it is final, or as it stands after `seconds` or at the daemon's end."""
    with deps.bus.subscribe(request_id=request_id) as subscription:
        # Read after subscribing, so that either this or an event shows a final state.
        request = await deps.submitter.find(request_id)
        if request.id != request_id:  # only a prefix of the id was given
            return await wait_until_final(deps, request.id, seconds)
        try:
            async with asyncio.timeout(seconds):
                while not (request.state.is_final or deps.stopping.is_set()):
                    ends = [event for event in await subscription.next() if _is_final(event)]
                    if ends:
                        request = await _request_of(deps, ends[-1])
        except TimeoutError:
            request = await deps.submitter.find(request_id)
    return request


async def _request_of(deps: Dependencies, event: Event) -> Request:
    """The request that the event is about; looked up when the event was read from the database."""
    if event.request is not None:
        return event.request
    assert event.request_id is not None
    return await deps.submitter.find(event.request_id)


class RequestStream:
    """States, progress and log lines of one request, until it is final."""

    def __init__(
        self, deps: Dependencies, request: Request, position: Position, *, logs: bool
    ) -> None:
        self._deps = deps
        self._request = request
        self._position = position
        self._log = LogFile(deps.paths.request_log(request.id), position.log_offset)
        self._logs = logs

    async def items(self) -> AsyncIterator[ServerSentEvent]:
        """Yield events, each with its place in the stream."""
        deps, request = self._deps, self._request
        with ExitStack() as stack:
            subscription = stack.enter_context(deps.bus.subscribe(request_id=request.id))
            if self._logs and not request.state.is_final:
                stack.enter_context(followed(self._log.path, subscription.wake))
            async for item in self._catch_up():
                yield item
            ends = False
            while not ends:
                subscription.wake.clear()
                events = subscription.take()
                is_over = self._request.state.is_final or any(map(_is_final, events))
                ends = is_over or deps.stopping.is_set() or subscription.lagged
                async for item in self._turn(events, final=ends):
                    yield item
                if not ends:
                    await subscription.wake.wait()

    async def _catch_up(self) -> AsyncIterator[ServerSentEvent]:
        """Yield the events that a client has missed; for a new client, progress and state."""
        is_new = not self._position.seq
        if is_new:
            self._position.seq = await self._deps.store.read(queries.LAST_SEQ)
        # Read after subscribing, so that either this or an event shows a final state, and before
        # the events are read, so that they include those of the state that is found here.
        self._request = await self._deps.submitter.find(self._request.id)
        if is_new:
            if (last := await last_report(self._deps.store, self._request.id)) is not None:
                yield sse("progress", last.data, self._position)
            yield sse("state", request_view(self._request), self._position)
            return
        async for page in event_pages(self._deps.store, self._position.seq, self._request.id):
            async for item in self._turn(page, final=any(map(_is_final, page))):
                yield item

    async def _turn(self, events: list[Event], *, final: bool) -> AsyncIterator[ServerSentEvent]:
        """The log first: what an operation printed before it ended comes before its end."""
        for text in self._log.pieces(final=final) if self._logs else ():
            self._position.log_offset = self._log.offset
            yield sse("log", {"text": text}, self._position)
        for event in events:
            if event.seq <= self._position.seq:
                continue
            self._position.seq = event.seq
            if event.kind != REQUEST_STATE:
                yield sse("progress", event.data, self._position)
                continue
            view = request_view(await _request_of(self._deps, event))
            # The row may be ahead of the event: a client must see the states in their order.
            if not _is_final(event):
                view |= {"state": event.data["state"], "result": None, "error": None}
            yield sse("state", view, self._position)


async def everything_stream(
    deps: Dependencies, position: Position
) -> AsyncIterator[ServerSentEvent]:
    """Yield every event, for a client that shows the whole."""
    with deps.bus.subscribe() as subscription:
        position.seq = position.seq or await deps.store.read(queries.LAST_SEQ)
        yield ServerSentEvent(comment="listening")
        async for page in event_pages(deps.store, position.seq):
            for item in _changes(position, page):
                yield item
        while not deps.stopping.is_set() and not subscription.lagged:
            for item in _changes(position, await subscription.next()):
                yield item


def _changes(position: Position, events: Iterable[Event]) -> Iterator[ServerSentEvent]:
    for event in events:
        if event.seq > position.seq:
            position.seq = event.seq
            yield sse("change", event_view(event), position)


async def event_pages(
    store: AsyncStore, seq: int, request_id: str | None = None
) -> AsyncIterator[list[Event]]:
    """Yield the events after number `seq`, page by page."""
    while page := await store.read(queries.events_after(seq, request_id, PAGE)):
        yield page
        seq = page[-1].seq
        if len(page) < PAGE:
            return


async def last_report(store: AsyncStore, request_id: str, key: str | None = None) -> Event | None:
    """Return the last progress among a request's newest events; with `key`, one that has it."""
    newest = await store.read(queries.newest_events(request_id, NEWEST))
    reports = (event for event in newest if event.kind == REQUEST_PROGRESS)
    return next((event for event in reports if key is None or event.data.get(key)), None)


async def text_stream(
    deps: Dependencies, path: Path, *, tail: int | None, since: float | None,
    until: Coroutine[Any, Any, object] | None,
) -> AsyncIterator[str]:  # fmt: skip
    """A log's last `tail` lines, not older than `since` seconds; followed until `until` ends."""
    start = 0 if tail is None else await asyncio.to_thread(offset_of_last_lines, path, tail)
    if since is not None:
        start = max(start, await asyncio.to_thread(offset_since, path, time.time() - since))
    log = LogFile(path, start)
    if until is not None:
        wake = asyncio.Event()
        end = asyncio.create_task(until)
        end.add_done_callback(lambda _: wake.set())
        try:
            with followed(path, wake):
                while not end.done():
                    for text in log.pieces():
                        yield text
                    await wake.wait()
                    wake.clear()
        finally:
            end.cancel()
    for text in log.pieces(final=True):
        yield text


async def request_ends(deps: Dependencies, request: Request) -> None:
    """Return when the request is final, or the daemon ends."""
    while not (request.state.is_final or deps.stopping.is_set()):
        request = await wait_until_final(deps, request.id, WAIT_SECONDS)


def _is_final(event: Event) -> bool:
    return event.kind == REQUEST_STATE and RequestState(event.data["state"]).is_final
