# SPDX-License-Identifier: Apache-2.0
"""One session at an OpenEnv server: a WebSocket on which one question is asked at a time.

    reset, step ──frame──▶ transport      one callback per connection takes all received bytes:
     ▲                                    a late answer is dropped with its connection, never half
     └── future ◀── Inbox ◀── transport   taken by a wait that was cancelled

There is no task and no queue per connection. `websockets` (sans-I/O) does the handshake, the close,
and all frames that are no whole messages; whole messages are ours in both directions (`inbox.py`,
`client_frame`). All connections of a loop share `Receiving`.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import orjson
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidURI
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import WebSocketURI, parse_uri

from ...env_host.protocol import ENVIRONMENT_HEADER, GENERATION_HEADER, MAX_MESSAGE_BYTES
from ...system.access_tokens import without_token
from ...system.websocket import KEY_BYTES, frame_head
from ..episodes import BytesLike, FailureReason
from ..errors import EpisodeFailed, NoEnvironment
from ..loop_budget import ReceiveBudget
from .answers import failure_of
from .inbox import SCRATCH_BYTES, Inbox
from .message_memory import MessageMemory

try:
    from websockets.speedups import apply_mask
except ImportError:  # where it was installed without a compiler
    from ...system.websocket import apply_mask

Server = tuple[str | None, str | None]  # an environment's name and launch, as its handshakes say

CONNECT_SECONDS = 30.0  # also the time to wait in the queue of a server that is full
_CLOSE = b'{"type":"close"}'
_PROBE_BYTES = 4096  # read of a connection that has to wait for the receive budget
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def session_url(address: str) -> str:
    """`http://host:8000` as `ws://host:8000/ws`."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        named = (parts.hostname or "").encode("idna")  # as it will be when it is looked up
        scheme = _SCHEMES[parts.scheme] if named and parts.port != 0 else None
    except (KeyError, ValueError):  # a scheme, a host or a port that there is not
        scheme = None
    if scheme is None:
        raise NoEnvironment(f"{_shown(address)!r} is not the address of an environment")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


class TlsContext:
    """Python's default TLS context, shared by all connections.

    Reading the machine's certificates takes 23 ms: hundreds of sessions that each read them on the
    loop held it for seconds. `SSL_CERT_FILE` and `SSL_CERT_DIR` name further certificates.
    """

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._context: ssl.SSLContext | None = None

    async def context(self) -> ssl.SSLContext:
        """The context, read on a thread when it is first asked for."""
        async with self._reading:
            if self._context is None:
                self._context = await asyncio.to_thread(ssl.create_default_context)
        return self._context


@dataclass(frozen=True, slots=True)
class Receiving:
    """What the connections of a loop share."""

    memory: MessageMemory
    budget: ReceiveBudget = field(default_factory=ReceiveBudget)
    tls: TlsContext = field(default_factory=TlsContext)
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(SCRATCH_BYTES)))


class Session(asyncio.BufferedProtocol):
    """One connection with its own environment instance, and at most one question open."""

    def __init__(self, uri: WebSocketURI, receiving: Receiving) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()  # the socket is closed
        self.server: Server = (None, None)  # who answers, once it is opened
        self._loop = loop
        self._budget = receiving.budget
        self._inbox = Inbox(
            receiving.scratch,
            receiving.memory,
            on_bytes=self._take_bytes,
            on_message=self._take_message,
        )
        self._frames = ClientProtocol(uri, max_size=MAX_MESSAGE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[BytesLike] | None = None
        self._pieces: list[bytes] = []
        self._lost: EpisodeFailed | None = None

    @classmethod
    async def open(
        cls, address: str, receiving: Receiving, seconds: float = CONNECT_SECONDS
    ) -> Session:
        """Connects to a server, or fails after so many seconds, also in the queue of a full one."""
        try:
            uri = parse_uri(session_url(address))
        except InvalidURI as exc:
            shown = _shown(address)
            raise NoEnvironment(f"{shown!r} is not the address of an environment") from exc
        try:
            async with asyncio.timeout(seconds):
                return await _opened(uri, receiving)
        except TimeoutError as exc:
            raise _not_connected(address, f"no answer within {seconds:g} s") from exc
        except OSError as exc:
            raise _not_connected(address, exc.strerror or str(exc)) from exc

    async def reset(self, arguments: Mapping[str, Any], *, seconds: float | None) -> BytesLike:
        """Begins an episode; returns the server's answer."""
        text = orjson.dumps({"type": "reset", "data": arguments})
        return await self._ask(text, seconds, "reset")

    async def step(self, action_json: bytes, *, seconds: float | None) -> BytesLike:
        """Takes a step; returns the server's answer."""
        return await self._ask(b'{"type":"step","data":%b}' % action_json, seconds, "step")

    def close(self) -> None:
        """Sends OpenEnv's close message and a close frame, without waiting for an answer."""
        if self._transport is not None and self._frames.state is State.OPEN:
            self._frames.send_text(_CLOSE)
            self._frames.send_close(1000)
            self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the socket now."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether a question can be asked."""
        usable = self._lost is None and self._transport is not None
        return usable and self._frames.state is State.OPEN

    async def _ask(self, text: bytes, seconds: float | None, what: str) -> BytesLike:
        """Sends a question and returns the server's answer.

        Raises:
            EpisodeFailed: CONNECTION_LOST, STEP_TIMED_OUT, or the error that the server sent.
        """
        if self._lost is not None:
            raise self._lost
        if self._transport is None or self._frames.state is not State.OPEN:
            raise EpisodeFailed(FailureReason.CONNECTION_LOST, "the connection is closed")
        answer: asyncio.Future[BytesLike] = self._loop.create_future()
        self._answer = answer
        self._transport.write(client_frame(text))
        timer = None
        if seconds is not None:  # an eighth of the cost of `asyncio.timeout`
            timer = self._loop.call_later(seconds, self._give_up, seconds, what)
        try:
            return await answer
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request to upgrade."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no such base class
        self._frames.send_request(self._frames.connect())
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory for the next bytes."""
        room = self._inbox.room
        return room if self._budget.is_open else room[:_PROBE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Takes received bytes, and pauses reading when the budget is spent."""
        self._inbox.take(nbytes)
        if not self._budget.spend(nbytes) and self._transport is not None:
            self._transport.pause_reading()
            self._budget.wait(self._inbox.missing_bytes, self._read_on)

    def eof_received(self) -> None:
        """Notes the end of the stream; the transport closes itself."""
        self._frames.receive_eof()
        self._take_events()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails what is waited for."""
        self._fail(self._end_of(exc))
        self._transport = None
        self._inbox.close()  # breaks a reference cycle
        self.ended.set_result(None)

    # Received data.

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _take_bytes(self, data: bytes) -> bool:
        self._frames.receive_data(data)
        self._take_events()
        return self._frames.state is not State.CONNECTING

    def _take_events(self) -> None:
        for event in self._frames.events_received():
            if isinstance(event, Frame):
                self._take_frame(event)
            elif isinstance(event, Response):
                self._take_response(event)
        self._flush()
        if self._frames.close_expected() and self._transport is not None:
            self._fail(self._end_of(None))  # the socket may take its time
            self._transport.close()

    def _take_response(self, response: Response) -> None:
        if self._frames.handshake_exc is None:
            told = response.headers
            self.server = told.get(ENVIRONMENT_HEADER), told.get(GENERATION_HEADER)
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
        text, self._pieces = b"".join(self._pieces), []
        self._take_message(text)

    def _take_message(self, text: BytesLike) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            self._lost = self._lost or failure_of(text)  # before it leaves: no room, going away
        elif not answer.done():
            answer.set_result(text)

    def _give_up(self, seconds: float, what: str) -> None:
        answer = self._answer
        if answer is None or answer.done():  # it arrived in this iteration of the loop
            return
        answer.set_exception(
            EpisodeFailed(
                FailureReason.STEP_TIMED_OUT, f"no answer to the {what} within {seconds:g} s"
            )
        )
        self.abort()  # a late answer would belong to no question

    def _end_of(self, exc: Exception | None) -> EpisodeFailed:
        wrong = self._frames.parser_exc
        if wrong is not None and not isinstance(wrong, EOFError):
            message = f"the connection was closed after a protocol error: {wrong}"
            return EpisodeFailed(FailureReason.PROTOCOL_ERROR, message)
        handshaken = self.opened.done()
        reason = FailureReason.CONNECTION_LOST if handshaken else FailureReason.NOT_CONNECTED
        told = self._frames.handshake_exc or self._frames.close_rcvd or exc or "it was closed"
        return EpisodeFailed(reason, f"the connection was lost: {told}")

    def _fail(self, why: EpisodeFailed) -> None:
        self._lost = self._lost or why
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


async def _opened(uri: WebSocketURI, receiving: Receiving) -> Session:
    """Opens a connection and waits for its handshake; closes it on failure."""
    loop = asyncio.get_running_loop()
    secure = await receiving.tls.context() if uri.secure else None
    _, session = await loop.create_connection(
        lambda: Session(uri, receiving), uri.host, uri.port, ssl=secure
    )
    try:
        await session.opened
    except BaseException:  # cancelled, too, even right after it was opened
        session.abort()
        raise
    return session


def _not_connected(address: str, why: str) -> EpisodeFailed:
    return EpisodeFailed(FailureReason.NOT_CONNECTED, f"{_shown(address)} does not answer: {why}")


def _shown(address: str) -> str:
    """The address without its token."""
    return without_token(address)[0]


def client_frame(text: bytes) -> bytes:
    """The text as one masked frame; the library builds it up in six writes."""
    key = os.urandom(KEY_BYTES)
    return frame_head(len(text), key=key) + apply_mask(text, key)
