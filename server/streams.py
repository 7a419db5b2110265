# SPDX-License-Identifier: Apache-2.0
"""What a client that waits is sent: events and log lines, as they come.

    hub ──▶ Subscription.wake ─┐
    LogWatcher ────────────────┼─▶ one asyncio.Event ─▶ a turn: what is new in events, then the log
    daemon stops ──────────────┘

Every item carries `<event seq>:<log offset>` as its id, so that a client that comes back with
`Last-Event-ID` continues where it was, whatever happened in between. A stream of one request ends
by itself after the final state and the last byte of the log.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..requests_db.records import Event, Json, Request
from ..requests_db.states import RequestState
from .hub import Subscription
from .log_streams import LogFile, offset_of_last_lines
from .services import Services
from .views import event_view, request_view

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": still here\n\n"
REPLAY_LIMIT = 1000


@dataclass(slots=True)
class Position:
    """How far a client has read."""

    seq: int = 0
    log_offset: int = 0

    @classmethod
    def parse(cls, last_event_id: str | None) -> Position:
        """From `Last-Event-ID`; the beginning when it is absent or not ours."""
        match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", last_event_id or "")
        return cls(int(match[1]), int(match[2])) if match else cls()


def sse(position: Position, event: str, data: Json) -> bytes:
    """One server-sent event."""
    head = f"id: {position.seq}:{position.log_offset}\nevent: {event}\ndata: ".encode()
    return head + orjson.dumps(data) + b"\n\n"


async def wait_until_final(services: Services, request: Request, seconds: float) -> Request:
    """The request once it is final, or as it stands after `seconds`."""
    if request.state.is_final:
        return request
    with services.hub.subscribe(request_id=request.id) as subscription:
        # Looked up after subscribing: a final state in between is in one or the other.
        request = await services.submitter.find(request.id)
        try:
            async with asyncio.timeout(seconds):
                while not request.state.is_final:
                    if any(_is_final(event) for event in await subscription.next()):
                        request = await services.submitter.find(request.id)
        except TimeoutError:
            request = await services.submitter.find(request.id)
    return request


class RequestStream:
    """States, progress and log lines of one request, until it is final."""

    def __init__(
        self, services: Services, request: Request, position: Position, *, logs: bool
    ) -> None:
        self._services = services
        self._request = request
        self._position = position
        self._log = LogFile(services.paths.request_log(request.id), position.log_offset)
        self._logs = logs

    async def items(self) -> AsyncIterator[bytes]:
        """Server-sent events, each with its place in the stream."""
        with ExitStack() as stack:
            subscription = self._subscribe(stack)
            events, first = await self._catch_up()
            for item in first:
                yield item
            while not self._ends(events, subscription):
                async for item in self._turn(events, final=False):
                    yield item
                while not subscription.wake.is_set():
                    if not await _woken(subscription):
                        yield KEEP_ALIVE
                subscription.wake.clear()
                events = subscription.take()
            async for item in self._turn(events, final=True):
                yield item

    def _subscribe(self, stack: ExitStack) -> Subscription:
        hub = self._services.hub
        subscription = stack.enter_context(hub.subscribe(request_id=self._request.id))
        if self._logs and not self._request.state.is_final:
            follow = self._services.logs.follow(self._log.path, subscription.wake)
            stack.enter_context(follow)
        return subscription

    async def _catch_up(self) -> tuple[list[Event], list[bytes]]:
        """What a client that comes back has missed; a new one is told how things stand."""
        events = await self._services.store.events_after(
            self._position.seq, request_id=self._request.id, limit=REPLAY_LIMIT
        )
        # Looked up after subscribing: a final state in between is in one or the other.
        self._request = await self._services.submitter.find(self._request.id)
        if self._position.seq:
            return events, []
        self._position.seq = max((event.seq for event in events), default=0)
        return [], [sse(self._position, "state", request_view(self._request))]

    def _ends(self, events: list[Event], subscription: Subscription) -> bool:
        over = self._request.state.is_final or any(_is_final(event) for event in events)
        return over or self._services.stopping.is_set() or subscription.lagged

    async def _turn(self, events: list[Event], *, final: bool) -> AsyncIterator[bytes]:
        """The log first: what an operation printed before it ended comes before its end."""
        for text in self._new_text(final):
            self._position.log_offset = self._log.offset
            yield sse(self._position, "log", {"text": text})
        for event in events:
            if event.seq > self._position.seq:
                self._position.seq = event.seq
                yield await _render(self._services, self._position, event)

    def _new_text(self, final: bool) -> Iterator[str]:
        if not self._logs:
            return iter(())
        return self._log.read_all() if final else self._log.read_lines()


async def everything_stream(services: Services, position: Position) -> AsyncIterator[bytes]:
    """Every event, for whoever draws a picture of the whole."""
    with services.hub.subscribe() as subscription:
        position.seq = position.seq or await services.store.last_seq()
        events = await services.store.events_after(position.seq, limit=REPLAY_LIMIT)
        yield b": listening\n\n"
        while not services.stopping.is_set() and not subscription.lagged:
            for event in events:
                if event.seq > position.seq:
                    position.seq = event.seq
                    yield sse(position, "change", event_view(event))
            if not await _woken(subscription):
                yield KEEP_ALIVE
            subscription.wake.clear()
            events = subscription.take()


async def text_stream(
    services: Services, path: Path, *, tail: int | None, until: Coroutine[Any, Any, None] | None
) -> AsyncIterator[str]:
    """A log as text: its last `tail` lines; followed until `until` returns, when that is given."""
    log = LogFile(path, 0 if tail is None else offset_of_last_lines(path, tail))
    if until is not None:
        wake = asyncio.Event()
        end = asyncio.create_task(until)
        end.add_done_callback(lambda _: wake.set())
        try:
            with services.logs.follow(path, wake):
                while not end.done():
                    for text in log.read_lines():
                        yield text
                    await wake.wait()
                    wake.clear()
        finally:
            end.cancel()
    for text in log.read_all():
        yield text


async def request_ends(services: Services, request: Request) -> None:
    """Return when the request is final, or the daemon ends."""
    while not (request.state.is_final or services.stopping.is_set()):
        request = await wait_until_final(services, request, KEEP_ALIVE_SECONDS)


async def daemon_ends(services: Services) -> None:
    """Return when the daemon ends."""
    await services.stopping.wait()


async def _render(services: Services, position: Position, event: Event) -> bytes:
    if event.kind == "request.state" and event.request_id is not None:
        request = await services.submitter.find(event.request_id)
        # The row may be ahead of the event: a client must see the states in their order.
        view = request_view(request)
        if not _is_final(event):
            view = {**view, "state": event.data["state"], "result": None, "error": None}
        return sse(position, "state", view)
    return sse(position, "progress", event.data)


async def _woken(subscription: Subscription) -> bool:
    try:
        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
            await subscription.wake.wait()
    except TimeoutError:
        return False
    return True


def _is_final(event: Event) -> bool:
    return event.kind == "request.state" and RequestState(event.data["state"]).is_final
