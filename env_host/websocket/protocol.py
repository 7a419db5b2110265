# SPDX-License-Identifier: Apache-2.0
"""`WebSocketProtocol`: one WebSocket on an asyncio transport, once its handshake is done.

    transport ──bytes──▶ whole_text, or else FrameParser ──▶ text_received, binary_received
        ▲                     │    └──▶ client_left, once, whatever the reason     (a subclass's)
        └── send_text, close ─┴── pong, close

A parser is kept only while a frame or message is incomplete: most connections never have one.

Closing: we send a close frame, and the peer has `CLOSE_SECONDS` to answer it. If the peer closes
first, we answer, and close once the remaining bytes are written, or after `CLOSE_SECONDS`.

Nothing more is buffered for a peer that does not read: the subclass checks `is_paused`, and only
the peer's last ping is answered. An exception that escapes from the subclass closes the connection
with 1011 and a line in the log (`break_off`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ...system.net import websocket as ws
from ...system.net.websocket import TEXT, frame_head
from .frames import (
    FrameError,
    FrameParser,
    Message,
    PartialMessages,
    close_frame,
    code_of_close,
    whole_text,
)

CLOSE_SECONDS = 10.0
_LARGE = 1 << 16  # from here on, two writes are cheaper than joining

log = logging.getLogger("openenvd.env_host")


class WebSocketProtocol(asyncio.Protocol):
    """Sends and receives messages; answers pings; closes."""

    close_seconds = CLOSE_SECONDS

    def __init__(
        self, loop: asyncio.AbstractEventLoop, partial: PartialMessages | None = None
    ) -> None:
        self._loop = loop
        self._partial = partial or PartialMessages()
        self._parser: FrameParser | None = None  # while something has not arrived whole
        self._closing: asyncio.TimerHandle | None = None  # our close frame is on its way
        self._has_left = False
        self._is_open = True  # messages are taken and sent: neither side has closed
        self._is_heard = True  # data has arrived since `check_liveness` was last called
        self._is_pinged = False  # `check_liveness` sent a ping then
        self._pong: bytes | None = None  # to be sent when the peer reads again
        self.is_paused = False  # the peer reads more slowly than we write
        self.transport: Any = None

    def text_received(self, payload: bytes) -> None:
        """A text message, not decoded yet."""
        raise NotImplementedError

    def binary_received(self) -> None:
        """A binary message."""
        raise NotImplementedError

    def client_left(self) -> None:
        """Called once: no more messages come, and none that is sent will arrive."""
        raise NotImplementedError

    def send_text(self, payload: bytes) -> None:
        """Send one message."""
        if self._is_open:
            self._write(TEXT, payload)

    def check_liveness(self) -> None:
        """Ping a peer that was silent since the last call; close if it did not answer a ping."""
        self.guarded(self._check_liveness)

    def close(self, code: int, reason: str = "") -> None:
        """Begin to close; tolerates a connection that is closed or closing."""
        if not self._is_open:
            return
        self._is_open = False
        self._closing = self._loop.call_later(self.close_seconds, self.transport.abort)
        self.transport.write(close_frame(code, reason))

    def connection_made(self, transport: Any) -> None:
        """Keep the transport; the handshake is done."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle any number of frames, or parts of them."""
        self._is_heard = True
        try:
            if self._parser is None and (text := whole_text(data)) is not None:
                if self._is_open:
                    self.text_received(text)
            else:
                self._parse(data)
        except FrameError as exc:
            self.fail(exc.code, exc.reason)
        except Exception as exc:
            self.break_off(exc)

    def _parse(self, data: bytes) -> None:
        parser = self._parser or FrameParser(self._partial.max_message_bytes)
        try:
            found = parser.feed(data)
        except FrameError as exc:
            self._received(exc.before)
            raise
        if not parser.is_between_messages:
            self._parser = parser
            self._partial.note(self, parser.kept_bytes)
        elif self._parser is not None:
            self._forget_partial()
        self._received(found)

    def _received(self, messages: list[Message]) -> None:
        for kind, payload in messages:
            if kind != TEXT:
                self._other(kind, payload)
            elif self._is_open:
                self.text_received(payload)

    def eof_received(self) -> bool | None:
        """Close: the peer has closed its side without a close frame."""
        self._close_when_written()
        self._leave()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection."""
        if self._closing is not None:
            self._closing.cancel()
        self.is_paused = False
        self._forget_partial()
        self._leave()

    def pause_writing(self) -> None:
        """Record that the peer does not keep up."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """Record that the peer reads again, and answer its last ping."""
        self.is_paused = False
        self._is_heard = True
        pong, self._pong = self._pong, None
        if pong is not None and self._is_open:
            self._write(ws.PONG, pong)

    def fail(self, code: int, reason: str) -> None:
        """Close at once: the peer broke the protocol."""
        self._forget_partial()
        if self._is_open:
            self.transport.write(close_frame(code, reason))
        self._close_when_written()
        self._leave()

    def break_off(self, exc: BaseException) -> None:
        """Close at once: the error was not foreseen, and the peer must not wait without end."""
        log.error("a connection is closed after an unexpected error", exc_info=exc)
        try:
            self.fail(ws.INTERNAL_ERROR_CLOSE, "internal error")
        except Exception:
            log.exception("the connection could not be closed; it is aborted")
            self.transport.abort()

    def guarded(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back; an exception that escapes breaks the connection off."""
        try:
            callback(*arguments)
        except Exception as exc:
            self.break_off(exc)

    def fail_text(self) -> None:
        """Close at once: the peer sent a text that is not UTF-8."""
        self.fail(ws.BAD_TEXT_CLOSE, "the text is not UTF-8")

    def shutdown(self) -> None:
        """Close: uvicorn calls this when it stops."""
        self.close(ws.GOING_AWAY_CLOSE)
        self.transport.close()

    def _check_liveness(self) -> None:
        if self._is_heard or not self._is_open:
            self._is_heard = self._is_pinged = False
        elif not self._is_pinged:
            self._is_pinged = True
            self._write(ws.PING, b"")
        else:
            unread = self.transport.get_write_buffer_size()
            why = (
                f"it does not read: {unread} bytes wait for it" if unread else "no answer to a ping"
            )
            fields = self._log_fields()
            whose = ", ".join(f"{name} {value}" for name, value in fields.items())
            log.warning("a client's connection is closed: %s (%s)", why, whose, extra=fields)
            self.fail(ws.INTERNAL_ERROR_CLOSE, "keepalive ping timeout")

    def _log_fields(self) -> dict[str, str]:
        """Return whose connection it is, for the log."""
        peer = self.transport.get_extra_info("peername")
        return {"client": f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"}

    def _write(self, kind: int, payload: bytes) -> None:
        size = len(payload)
        if size < _LARGE:
            self.transport.write(frame_head(size, kind) + payload)
        else:
            self.transport.write(frame_head(size, kind))
            self.transport.write(payload)

    def _other(self, kind: int, payload: bytes) -> None:
        if kind == ws.PING:
            if self._is_open:
                if self.is_paused:
                    self._pong = payload
                else:
                    self._write(ws.PONG, payload)
        elif kind == ws.CLOSE:
            code = code_of_close(payload)
            if self._is_open:
                self.transport.write(close_frame(code))
            self._close_when_written()
            self._leave()
        elif kind != ws.PONG and self._is_open:
            self.binary_received()

    def _forget_partial(self) -> None:
        if self._parser is not None:
            self._parser = None
            self._partial.note(self, 0)

    def _close_when_written(self) -> None:
        """Close when all bytes are written, or after `CLOSE_SECONDS` if the peer does not read."""
        self._is_open = False
        self.transport.close()
        if self._closing is None:
            self._closing = self._loop.call_later(self.close_seconds, self.transport.abort)

    def _leave(self) -> None:
        self._is_open = False
        if not self._has_left:
            self._has_left = True
            self.client_left()
