# SPDX-License-Identifier: Apache-2.0
"""One session at an OpenEnv server: a WebSocket on which one question is asked at a time.

    ask ──frame──▶ transport              one callback per connection takes everything that comes:
     ▲                                    an answer that is late is dropped with its connection,
     └──── future ◀── data_received ◀──   never half taken by a wait that was given up

There is no task and no queue per connection. `websockets` (sans-I/O) does the framing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import orjson
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidURI
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import WebSocketURI, parse_uri

from ..env_host.protocol import MAX_MESSAGE_BYTES
from .answers import failure_of
from .episodes import FailureReason
from .errors import EpisodeFailed, NoEnvironment
from .intake import Intake

CONNECT_SECONDS = 30.0  # also the time to wait in the queue of a server that is full
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_CLOSE = b'{"type":"close"}'


def session_url(address: str) -> str:
    """`http://host:8000` as `ws://host:8000/ws`.

    Raises:
        NoEnvironment: it is not an address.
    """
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        scheme = _SCHEMES[parts.scheme] if parts.hostname and parts.port != 0 else None
    except (KeyError, ValueError):  # a scheme, a host or a port that there is not
        scheme = None
    if scheme is None:
        raise NoEnvironment(f"{address!r} is not the address of an environment")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


class Session:
    """One connection with its own environment instance."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    @classmethod
    async def open(
        cls, address: str, seconds: float = CONNECT_SECONDS, intake: Intake | None = None
    ) -> Session:
        """Connect; sessions of one loop share the `intake`.

        Raises:
            EpisodeFailed: NOT_CONNECTED, NO_CAPACITY.
            NoEnvironment: the address is none.
        """
        try:
            uri = parse_uri(session_url(address))
        except InvalidURI as exc:
            raise NoEnvironment(f"{address!r} is not the address of an environment") from exc
        try:
            async with asyncio.timeout(seconds):
                return cls(await _opened(uri, intake or Intake()))
        except TimeoutError as exc:
            raise _not_connected(address, f"no answer within {seconds:g} s") from exc
        except OSError as exc:
            raise _not_connected(address, exc.strerror or str(exc)) from exc

    @property
    def is_open(self) -> bool:
        """Whether another question can be asked."""
        return self._wire.is_open

    async def reset(self, arguments: Mapping[str, Any], *, seconds: float | None) -> bytes:
        """Begin an episode; the server's answer."""
        text = orjson.dumps({"type": "reset", "data": arguments})
        return await self._ask(text, seconds, "reset")

    async def step(self, action_json: bytes, *, seconds: float | None) -> bytes:
        """Take a step; the server's answer."""
        return await self._ask(b'{"type":"step","data":%b}' % action_json, seconds, "step")

    def close(self) -> None:
        """Say good-bye, and let go at once."""
        self._wire.leave()

    def abort(self) -> None:
        """Let go without a word."""
        self._wire.abort()

    async def _ask(self, text: bytes, seconds: float | None, what: str) -> bytes:
        """
        Raises:
            EpisodeFailed: CONNECTION_LOST, STEP_TIMED_OUT, or what the server said as it left.
        """
        answer = self._wire.ask(text)
        timer = None if seconds is None else self._wire.give_up_after(seconds, what)
        try:
            return await answer
        except asyncio.CancelledError:
            self._wire.abort()
            raise
        finally:
            if timer is not None:
                timer.cancel()


class _Wire(asyncio.Protocol):
    """Bytes to frames and back; the one question that is open."""

    def __init__(self, uri: WebSocketURI, intake: Intake) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._intake = intake
        self._unread: list[bytes] = []  # waits at the intake, and nothing more is read meanwhile
        self._frames = ClientProtocol(uri, max_size=MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._pieces: list[bytes] = []
        self._lost: EpisodeFailed | None = None

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no such base class
        self._frames.send_request(self._frames.connect())
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Whatever comes."""
        if not self._unread and self._intake.admits(len(data)):
            self._frames.receive_data(data)
            self._take_events()
            return
        self._unread.append(data)
        if len(self._unread) == 1 and self._transport is not None:
            self._transport.pause_reading()
            self._intake.wait(len(data), self._read_on)

    def eof_received(self) -> None:
        """The server's last byte; the transport closes itself."""
        self._take_unread()
        self._frames.receive_eof()
        self._take_events()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits is told."""
        self._take_unread()
        told = self._frames.handshake_exc or self._frames.close_rcvd or exc or "it was closed"
        self._fail(f"the connection was lost: {told}")
        self._transport = None

    # Called by the session.

    def ask(self, text: bytes) -> asyncio.Future[bytes]:
        """Send it; the future of the answer."""
        if self._lost is not None:
            raise self._lost
        if self._transport is None or self._frames.state.name != "OPEN":
            raise EpisodeFailed(FailureReason.CONNECTION_LOST, "the connection is closed")
        self._answer = self._loop.create_future()
        self._frames.send_text(text)
        self._flush()
        return self._answer

    def give_up_after(self, seconds: float, what: str) -> asyncio.TimerHandle:
        """A timer for the question that is open: an eighth of what `asyncio.timeout` costs."""
        return self._loop.call_later(seconds, self._give_up, seconds, what)

    def leave(self) -> None:
        """A close message of OpenEnv's, a close frame, and no waiting for either's answer."""
        if self._transport is not None and self._frames.state.name == "OPEN":
            self._frames.send_text(_CLOSE)
            self._frames.send_close(1000)
            self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket now."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether a question can be asked."""
        usable = self._lost is None and self._transport is not None
        return usable and self._frames.state.name == "OPEN"

    # What came.

    def _read_on(self) -> None:
        self._take_unread()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _take_unread(self) -> None:
        unread, self._unread = self._unread, []
        for data in unread:
            self._frames.receive_data(data)
        if unread:
            self._take_events()

    def _take_events(self) -> None:
        for event in self._frames.events_received():
            if isinstance(event, Frame):
                self._take_frame(event)
            elif isinstance(event, Response):
                self._take_response(event)
        self._flush()
        if self._frames.close_expected() and self._transport is not None:
            self._transport.close()

    def _take_response(self, response: Response) -> None:
        if self._frames.handshake_exc is None:
            if not self.opened.done():
                self.opened.set_result(None)
            return
        full = response.status_code in (429, 503)
        reason = FailureReason.NO_CAPACITY if full else FailureReason.NOT_CONNECTED
        self._lost = EpisodeFailed(reason, f"the server refused: {self._frames.handshake_exc}")

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        self._pieces.append(bytes(frame.data))
        if not frame.fin:
            return
        text = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        answer, self._answer = self._answer, None
        if answer is None:
            self._lost = failure_of(text)  # before it leaves: no room, going away
        elif not answer.done():
            answer.set_result(text)

    def _give_up(self, seconds: float, what: str) -> None:
        answer = self._answer
        if answer is None or answer.done():  # it came in this very turn of the loop
            return
        answer.set_exception(
            EpisodeFailed(
                FailureReason.STEP_TIMED_OUT, f"no answer to the {what} within {seconds:g} s"
            )
        )
        self.abort()  # its answer, should it come, belongs to nobody

    def _fail(self, message: str) -> None:
        handshaken = self.opened.done()
        reason = FailureReason.CONNECTION_LOST if handshaken else FailureReason.NOT_CONNECTED
        self._lost = self._lost or EpisodeFailed(reason, message)
        for future in (self.opened, self._answer):
            if future is not None and not future.done():
                future.set_exception(self._lost)
                future.exception()  # seen: whoever waited for it may have been cancelled

    def _flush(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for data in self._frames.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()


async def _opened(uri: WebSocketURI, intake: Intake) -> _Wire:
    """A connection after its handshake; none is left behind when that fails or is cancelled."""
    loop = asyncio.get_running_loop()
    secure = ssl.create_default_context() if uri.secure else None
    _, wire = await loop.create_connection(
        lambda: _Wire(uri, intake), uri.host, uri.port, ssl=secure
    )
    try:
        await wire.opened
    except BaseException:  # cancelled, too, even right after it was opened
        wire.abort()
        raise
    return wire


def _not_connected(address: str, why: str) -> EpisodeFailed:
    return EpisodeFailed(FailureReason.NOT_CONNECTED, f"{address} does not answer: {why}")
