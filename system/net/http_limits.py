# SPDX-License-Identifier: Apache-2.0
"""Limits of size and time for one HTTP connection, around uvicorn's own protocol.

    bytes ─▶ HttpLimits.data_received ─▶ uvicorn's protocol ─▶ BodyLimit ─▶ the application
             head: bytes (431), time (408)                     body: announced or counted (413),
                                                               all together (503)
             body: progress (408)
             response: progress of its reader (cut)

uvicorn limits neither the bytes of a head that httptools parses, nor the time of the first head or
of a body. These limits cost a request 2 µs. One timer per connection checks the times, and is set
again only when it has fired.

`HttpLimits` is mixed into the class that uvicorn chooses (`limited`), and uses what uvicorn's two
implementations have in common: `cycle`, `flow`, `transport`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ..text.units import MB
from .connection_limit import ConnectionLimit, closing_answer

MAX_HEAD_BYTES = 32 * 1024
MAX_BODY_BYTES = 100 * MB  # of a request, unless a setting says otherwise
SHORT_BODY_BYTES = 64 * 1024  # are received before the application asks for them, uncounted
BODIES_AT_ONCE = 4  # of the greatest length may be incomplete
WAIT_SECONDS = 30.0  # that a body waits for others to be completed
MAX_PIPELINED = 64  # requests of one connection that wait for the present one

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpTiming:
    """The time limits for the parts of a request."""

    head_seconds: float = 30.0  # including the time until its first byte
    body_seconds: float = 30.0  # the period in which a body must grow by `body_bytes`
    body_bytes: int = 30 * 1024  # if the application was ready to read them
    response_seconds: float = 30.0  # the period in which a client must read `body_bytes`
    unread_seconds: float = 5.0  # for the rest of a body after its request's answer


class HttpLimits:
    """One connection: a mixin before uvicorn's HTTP protocol."""

    timing = HttpTiming()
    limit: ConnectionLimit | None = None  # that counts it; None: no limit of ours

    # uvicorn's
    cycle: Any
    flow: Any
    loop: asyncio.AbstractEventLoop
    transport: Any

    _timer: asyncio.TimerHandle | None = None
    _reports_bodies = False  # by `on_body`: httptools; h11 bounds trailers itself
    _is_refused = False  # answered by us: further data is dropped
    _unused_bytes = 0  # received outside of complete heads and bodies
    _head_since: float | None = None  # None: no byte of the next head has come
    _received_bytes = 0
    _seen: tuple[Any, int] = (None, 0)  # the request whose body was checked; its bytes then
    _unsent: tuple[float, int] | None = None  # since when this number of bytes waits to be sent

    def connection_made(self, transport: Any) -> None:
        """Wait for the first head, for a limited time."""
        super().connection_made(transport)  # type: ignore[misc]
        if self.limit is not None:
            self.limit.add(self)
        self._head_since = self.loop.time()
        self._timer = self.loop.call_later(self.timing.head_seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        if self.limit is not None:
            self.limit.remove(self)
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """Pass data on within the limits."""
        if self._is_refused:
            return
        size, cycle = len(data), self.cycle
        self._received_bytes += size
        if cycle is None or not cycle.more_body:
            if self._head_since is None:
                self._head_since = self.loop.time()
            if self._unused_bytes + size > MAX_HEAD_BYTES:
                self._take_long(data)
                return
            self._unused_bytes += size
        elif self._reports_bodies:
            if self._unused_bytes > MAX_HEAD_BYTES:  # of trailers
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
            self._unused_bytes += size
        super().data_received(data)  # type: ignore[misc]
        if self.cycle is not cycle:
            self._request_began()

    def handle_websocket_upgrade(self, *request: Any) -> None:
        """Leave the connection to a WebSocket's protocol, which has limits of its own."""
        if self.limit is not None:
            self.limit.remove(self)
        super().handle_websocket_upgrade(*request)  # type: ignore[misc]
        opened = self.transport.get_protocol()
        # websockets reads heads more strictly, and uvicorn then never answers.
        if not getattr(opened, "handshake_initiated", True) and not self.transport.is_closing():
            self.transport.write(closing_answer(HTTPStatus.BAD_REQUEST))
            self.transport.close()

    def resume_writing(self) -> None:
        """Record that the client reads."""
        self._unsent = None
        super().resume_writing()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """Record that a body has arrived (httptools)."""
        self._unused_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """Record the end of a body whose request was answered before (httptools)."""
        self._unused_bytes = 0
        if (cycle := self.cycle) is not None and cycle.response_complete:
            cycle.more_body = False
        super().on_message_complete()  # type: ignore[misc]

    def on_response_complete(self) -> None:
        """Be ready for the next request; the rest of this one's body must come soon."""
        cycle = self.cycle
        super().on_response_complete()  # type: ignore[misc]
        if self.cycle is not cycle:  # it had come already, behind this one (h11)
            self._request_began()
        elif cycle.response_complete:  # no other is in the pipeline
            if cycle.more_body:
                self.loop.call_later(self.timing.unread_seconds, self._end_unread, cycle)
            if self.limit is not None:
                self.limit.note_idle(self)

    def _request_began(self) -> None:
        self._head_since = None
        self._unused_bytes = 0
        if self.limit is not None:
            self.limit.note_request(self)
        if len(getattr(self, "pipeline", ())) > MAX_PIPELINED:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS)

    def _take_long(self, data: bytes) -> None:
        """Read as much as a head may have; if the head ends there, read the rest, too."""
        cycle, room = self.cycle, MAX_HEAD_BYTES - self._unused_bytes
        super().data_received(data[:room])  # type: ignore[misc]
        if self.cycle is cycle:
            if not self.transport.is_closing():
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self._request_began()
        if self._is_mine():
            self.data_received(data[room:])

    def _look(self) -> None:
        """Close a connection that has taken too long, and check again later."""
        self._timer = None
        if self.transport.get_protocol() is not self:
            return
        now, cycle = self.loop.time(), self.cycle
        if self._is_unread(now):
            self.transport.abort()
            return
        if self._is_refused or self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self._timer = self.loop.call_later(self.timing.body_seconds, self._look)
            return
        seconds = self.timing.body_seconds
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            seconds = self.timing.head_seconds
            if self._head_since is not None:
                seconds -= now - self._head_since
            if seconds <= 0:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT)
                return
        elif not cycle.response_complete and self._is_stalled():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
            return
        self._timer = self.loop.call_later(seconds, self._look)

    def _is_stalled(self) -> bool:
        """Return whether a body has grown too little since this was last called."""
        cycle, (before, bytes_before) = self.cycle, self._seen
        if not cycle.more_body or self.flow.read_paused:
            self._seen = None, 0  # the application is slow, not the client
            return False
        self._seen = cycle, self._received_bytes
        return before is cycle and self._received_bytes - bytes_before < self.timing.body_bytes

    def _is_unread(self, now: float) -> bool:
        """Return whether the client has read too little of the answer for too long."""
        cycle = self.cycle
        size: int = self.transport.get_write_buffer_size()
        is_growing = cycle is not None and not cycle.response_complete
        if not size or (is_growing and not self.flow.write_paused):
            self._unsent = None
        elif self._unsent is None:
            self._unsent = now, size
        elif now - self._unsent[0] >= self.timing.response_seconds:
            taken = self._unsent[1] - size
            self._unsent = now, size
            return taken < self.timing.body_bytes
        return False

    def _end_unread(self, cycle: Any) -> None:
        if self.cycle is cycle and cycle.more_body and self._is_mine():
            self.transport.abort()

    def _is_mine(self) -> bool:
        """Return whether the connection is open, and has not become a WebSocket."""
        return not self.transport.is_closing() and self.transport.get_protocol() is self

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer if possible, and close; further data of the client is dropped.

        It reads on for a moment, because closing a connection with unread bytes resets it, and the
        client would see that instead of the answer.
        """
        self._is_refused = True
        cycle = self.cycle
        may_answer = cycle is None or cycle.more_body is not cycle.response_complete
        if cycle is not None and not cycle.response_complete:
            may_answer = may_answer and not cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        is_silent = not self._received_bytes
        if may_answer and not is_silent:
            self.transport.write(closing_answer(status))
        if not may_answer or is_silent or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(self.timing.unread_seconds, self.transport.abort)


class BodyLimit:
    """ASGI middleware that limits each body, and all incomplete bodies together.

    A body that is too long is refused by its announced length, a chunked one by its received bytes.
    When the incomplete bodies take as much as `BODIES_AT_ONCE` of the longest, only the oldest is
    read; the others wait for at most `wait_seconds`, and are then refused (503).
    """

    def __init__(
        self, app: Any, most_bytes: int = MAX_BODY_BYTES, *, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._wait_seconds = wait_seconds
        self._unfinished: dict[object, int] = {}  # bytes received of each, the oldest first
        self._total = 0
        self._fewer = asyncio.Event()  # a new one each time there are fewer

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413 or 503."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                size = int(value) if name == b"content-length" else 0
                if size > self._most_bytes:
                    await self._refuse(send)
                    return
                if size > SHORT_BODY_BYTES or name == b"transfer-encoding":
                    await self._count(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _count(self, scope: Any, receive: Receive, send: Send) -> None:
        received_bytes = 0
        is_started = is_over = False
        body = object()

        async def receive_some() -> Message:
            nonlocal received_bytes, is_over
            status = HTTPStatus.SERVICE_UNAVAILABLE
            if not received_bytes or await self._has_room(body):
                message = await receive()
                received_bytes += len(message.get("body", b""))
                self._note(body, received_bytes if message.get("more_body") else 0)
                if received_bytes <= self._most_bytes:
                    return message
                status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            if not is_over and not is_started:
                is_over = True
                await self._refuse(send, status)
            is_over = True
            return {"type": "http.disconnect"}

        async def send_unless_over(message: Message) -> None:
            nonlocal is_started
            is_started = True
            if not is_over:
                await send(message)

        try:
            await self._app(scope, receive_some, send_unless_over)
        finally:
            self._note(body, 0)

    def _note(self, body: object, size: int) -> None:
        """Record how much of a body has arrived; 0: it is complete, or abandoned."""
        self._total += size - self._unfinished.get(body, 0)
        if size:
            self._unfinished[body] = size
        elif self._unfinished.pop(body, 0):
            fewer, self._fewer = self._fewer, asyncio.Event()
            fewer.set()

    async def _has_room(self, body: object) -> bool:
        """Wait until more of a body may be read; False if that takes too long."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                while self._total > BODIES_AT_ONCE * self._most_bytes:
                    if next(iter(self._unfinished)) is body:
                        break
                    await self._fewer.wait()
        except TimeoutError:
            return False
        return True

    async def _refuse(
        self, send: Send, status: HTTPStatus = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    ) -> None:
        detail = f"A body may have at most {self._most_bytes} bytes"
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            detail = "The bodies of other requests take all room; try again later"
        body = json.dumps({"detail": detail}).encode()
        await send_answer(send, status.value, [(b"content-type", b"application/json")], body)


async def send_answer(
    send: Send, status: int, headers: Headers, body: bytes, kind: str = "http.response"
) -> None:
    """Send a whole ASGI answer; the refusal of a handshake has another message type."""
    if status != HTTPStatus.NO_CONTENT:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


def limited(http_protocol: type[Any], timing: HttpTiming | None = None) -> type[Any]:
    """Return uvicorn's protocol class with limits."""
    members = {
        "timing": timing or HttpTiming(),
        "_reports_bodies": hasattr(http_protocol, "on_body"),
    }
    return type(f"Limited{http_protocol.__name__}", (HttpLimits, http_protocol), members)
