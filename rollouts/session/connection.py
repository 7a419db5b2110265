# SPDX-License-Identifier: Apache-2.0
"""A WebSocket with one answer to each message: `websockets`, but whole messages are read here.

    socket ─▶ data_received ─┬─ a whole message, in one frame ─────────────▶ the answer, or unasked
                             └─ handshake, fragments, pings, closes, errors ─▶ the library

The library takes 1.4 to 1.6 times the CPU for an answer (`docs/decisions/0034`), so whole messages
are read here. All other frames are passed to the library one by one, so that its parser is always
at the start of a frame. After fragments, or a frame directly behind the handshake, the library
reads the rest of the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from ...schema.protocol import MAX_MESSAGE_BYTES
from ...system.net import websocket

Message = bytes | bytearray

_WHOLE = (websocket.FIN | websocket.TEXT, websocket.FIN | websocket.BINARY)
_CONTROL = [websocket.FIN | kind for kind in (websocket.CLOSE, websocket.PING, websocket.PONG)]
_END_OF_HANDSHAKE = b"\r\n\r\n"


class Connection(ClientConnection):
    """A connection with one exchange at a time.

    Attributes:
        unasked: The first message that came without a question. Later ones are dropped.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.unasked: Message | None = None
        self._answer: asyncio.Future[Message | None] | None = None
        self._is_between_frames = False  # whether the library is, too
        self._head = b""  # bytes of an incomplete frame head or control frame
        self._message = bytearray()  # the bytes of an incomplete message
        self._missing_bytes = 0  # of that message
        self._fragments = bytearray()

    async def exchange(self, message: str | bytes) -> Message:
        """Send a message, and return the next received one.

        Raises `ConnectionClosed`: the connection was closed before the call, or closes during it.
        """
        if self.state is State.OPEN:
            answer: asyncio.Future[Message | None] = self.loop.create_future()
            self._answer = answer
            self.protocol.send_text(message.encode() if isinstance(message, str) else message)
            self.send_data()
            try:
                if (found := await answer) is not None:
                    return found
            finally:
                self._answer = None
        await self.recv(decode=False)  # always raises: the library's queue gets no message
        raise AssertionError("a closed connection has received a message")

    def data_received(self, data: bytes) -> None:
        """Read whole messages from the received data, and pass other frames to the library."""
        if self._missing_bytes:
            data = self._fill(data)
        if self._head:
            data, self._head = self._head + data, b""
        at = 0
        while at < len(data) and self._is_between_frames:
            at = self._take_frame(data, at)
        if at < len(data):
            self._pass_on(data[at:])

    def process_event(self, event: Any) -> None:
        """Handle a frame from the library, or its response to the handshake."""
        if not isinstance(event, Frame) or event.opcode >= Opcode.CLOSE:  # the first of control
            super().process_event(event)
            return
        self._fragments += event.data
        if event.fin:
            message, self._fragments = self._fragments, bytearray()
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the call that is under way, and drop the received data."""
        super().connection_lost(exc)
        self._message = self._fragments = bytearray()
        if (end := self.protocol.parser_exc) is not None:
            end.__traceback__ = None  # its stack frames hold the last message in a reference cycle
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _fill(self, data: bytes) -> bytes:
        """Add data to the incomplete message, and return the data behind it."""
        taken = data[: self._missing_bytes]
        self._message += taken
        self._missing_bytes -= len(taken)
        if not self._missing_bytes:
            message, self._message = self._message, bytearray()
            self._take(message)
        return data[len(taken) :]

    def _take_frame(self, data: bytes, at: int) -> int:
        """Read the frame that begins there, or keep its beginning; return where the next begins."""
        if (head := websocket.parse_head(data, at)) is None:
            self._head = data[at:]
            return len(data)
        first, is_masked, payload_at, end = head
        size_bytes = end - payload_at
        if first in _WHOLE and not is_masked and size_bytes <= MAX_MESSAGE_BYTES:
            if end > len(data):
                self._message += memoryview(data)[payload_at:]
                self._missing_bytes = end - len(data)
            else:
                self._take(data[payload_at:end])
        elif first in _CONTROL and not is_masked and size_bytes <= websocket.MAX_CONTROL_BYTES:
            if end > len(data):
                self._head = data[at:]
            else:
                self._pass_on(data[at:end])
        else:  # fragments, or a protocol error
            self._is_between_frames = False
            return at
        return min(end, len(data))

    def _pass_on(self, data: bytes) -> None:
        was_open = self.state is State.OPEN
        super().data_received(data)
        if self.state is State.CLOSING:
            self._is_between_frames = False
            self.transport.close()  # after pending writes
        elif not was_open and self.state is State.OPEN:  # the handshake, perhaps with data
            self._is_between_frames = data.find(_END_OF_HANDSHAKE) == len(data) - 4

    def _take(self, message: Message) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)
        elif self.unasked is None:
            self.unasked = message
