# SPDX-License-Identifier: Apache-2.0
"""Parses the bytes that a WebSocket client sends into messages; knows no sockets.

    bytes received ──▶ whole_text ──▶ payload, of nearly all that clients send
                └────▶ FrameParser.feed ──▶ [(TEXT, payload), (PING, payload), …]

Fragmented messages are returned whole. A breach of the protocol raises `FrameError` as soon as the
head of a frame shows it. The JSON parser checks that a text is UTF-8; fragments are checked here.
Why no library is used: `docs/decisions/0009-own-websocket-framing.md`.

`PartialMessages` bounds the memory of the incomplete messages of all clients of one process. One
message may be long, and a client may take its time. Without this bound a few hundred clients that
each send most of a message, and then wait, take all memory. Beyond it the connection with the most
kept bytes is closed with 1013, which frees most at the price of one client. Clients whose messages
are short, and so arrive whole, are never affected.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from ...schema.protocol import MAX_MESSAGE_BYTES
from ...system.net import websocket as ws
from ...system.net.websocket import FIN, KEY_BYTES, MASKED, MAX_CONTROL_BYTES, OPCODE, TEXT
from ...system.text.units import MB

if TYPE_CHECKING:
    from .protocol import WebSocketProtocol

try:
    from websockets.speedups import apply_mask
except ImportError:  # no wheel for this Python
    from websockets.utils import apply_mask

_WHOLE_TEXT = FIN | TEXT
_RESERVED = 0x70
_MEDIUM = MASKED | 126  # the second byte of a frame whose length takes two more
_CONTROL = 0x8  # opcodes from here on
_SHORT_HEAD = 2 + KEY_BYTES  # bytes, of a masked frame of at most `MAX_CONTROL_BYTES`
_LONGER_HEAD = 4 + KEY_BYTES  # of one of less than 64 kB
_TOP_BIT = 1 << 63  # of a length, which must not be set (RFC 6455, section 5.2)
_CHUNK_BYTES = 64  # overhead of each piece of a frame: a piece may be as short as one byte
_LARGE_BYTES = 1 << 16  # from here on, copying a slice costs more than a view
_OPCODES = frozenset((ws.CONTINUATION, TEXT, ws.BINARY, ws.CLOSE, ws.PING, ws.PONG))

Message = tuple[int, bytes]


class FrameError(Exception):
    """The peer broke the protocol; `code` and `reason` go into our close frame.

    `before` are the messages that came with the same bytes, before the breach.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.before: list[Message] = []


def whole_text(data: bytes) -> bytes | None:
    """Return the text if `data` is one whole frame of less than 64 kB, as most messages are.

    None: use `FrameParser`, which would return the same text, but takes three times as long.
    """
    size = len(data)
    if size <= _SHORT_HEAD or data[0] != _WHOLE_TEXT:
        return None
    length = data[1] - MASKED
    if 0 <= length <= MAX_CONTROL_BYTES:
        if length + _SHORT_HEAD != size:
            return None
        return apply_mask(data[_SHORT_HEAD:], data[2:_SHORT_HEAD])
    length = data[2] << 8 | data[3]
    is_minimal = length > MAX_CONTROL_BYTES
    if data[1] != _MEDIUM or not is_minimal or length + _LONGER_HEAD != size:
        return None
    return apply_mask(data[_LONGER_HEAD:], data[4:_LONGER_HEAD])


class FrameParser:
    """Parses the bytes of one connection into messages of `max_bytes` (64 kB or more) at most."""

    __slots__ = ("_chunks", "_fragments", "_held", "_max_bytes", "_wanted")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] | None = None  # of a frame that has not arrived whole
        self._held = 0  # bytes in them
        self._wanted = 0  # bytes that are needed before it is parsed again
        self._fragments: _Fragments | None = None  # of a message in several frames

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`, and the control frames between them.

        Raises `FrameError`: the peer broke the protocol.
        """
        if self._chunks is not None:
            self._chunks.append(data)
            self._held += len(data)
            if self._held < self._wanted:
                return []
            data = b"".join(self._chunks)
            self._chunks = None
        found: list[Message] = []
        try:
            self._parse(data, found)
        except FrameError as exc:
            exc.before = found
            raise
        return found

    def _parse(self, data: bytes, found: list[Message]) -> None:
        """Add the messages in the data to those that were found; keep what is incomplete."""
        position, end = 0, len(data)
        while position < end:
            head = ws.parse_head(data, position)
            if head is None:
                start = data[position:]
                if len(start) > 1:  # two bytes of an incomplete head can show that it is wrong
                    self._check_start(start[0], bool(start[1] & MASKED), start[1] & ~MASKED)
                self._keep(start, len(start) + 1)
                break
            first, is_masked, payload_at, stop = head
            self._check(first, is_masked, payload_at - position, size := stop - payload_at)
            if stop > end:
                self._keep(data[position:] if position else data, stop - position)
                break
            key = data[payload_at - KEY_BYTES : payload_at]
            source = data if size < _LARGE_BYTES else memoryview(data)
            if message := self._message(first, apply_mask(source[payload_at:stop], key)):
                found.append(message)
            position = stop

    @property
    def is_between_messages(self) -> bool:
        """Return whether nothing is kept of what has arrived."""
        return self._chunks is None and self._fragments is None

    @property
    def kept_bytes(self) -> int:
        """Return how much memory is taken by what has not arrived whole."""
        size = 0 if self._fragments is None else len(self._fragments.data)
        if self._chunks is not None:
            size += self._held + _CHUNK_BYTES * len(self._chunks)
        return size

    def _check(self, first: int, is_masked: bool, head_bytes: int, size: int) -> None:
        self._check_start(first, is_masked, size)
        if size >= _TOP_BIT or head_bytes != ws.least_head_bytes(size) + KEY_BYTES:
            raise FrameError(ws.PROTOCOL_ERROR_CLOSE, "a length is not as short as it can be")
        held = 0 if self._fragments is None or first & _CONTROL else len(self._fragments.data)
        if held + size > self._max_bytes:
            raise FrameError(ws.TOO_BIG_CLOSE, f"more than {self._max_bytes} bytes")

    def _check_start(self, first: int, is_masked: bool, size: int) -> None:
        if not is_masked:
            raise FrameError(ws.PROTOCOL_ERROR_CLOSE, "a client must mask its frames")
        if first & _RESERVED or first & OPCODE not in _OPCODES:
            raise FrameError(ws.PROTOCOL_ERROR_CLOSE, "reserved bits or opcode")
        if first & _CONTROL:
            if size > MAX_CONTROL_BYTES or not first & FIN:
                raise FrameError(ws.PROTOCOL_ERROR_CLOSE, "control frame too long or fragmented")
        elif (first & OPCODE == ws.CONTINUATION) is (self._fragments is None):
            raise FrameError(ws.PROTOCOL_ERROR_CLOSE, "a fragment out of order")

    def _keep(self, data: bytes, wanted: int) -> None:
        self._chunks = [data]
        self._held = len(data)
        self._wanted = wanted

    def _message(self, first: int, payload: bytes) -> Message | None:
        """Return the message that a frame completes; None for a fragment before the last."""
        kind = first & OPCODE
        fragments = self._fragments
        if kind & _CONTROL or (first & FIN and fragments is None):
            return kind, payload
        if fragments is None:
            fragments = self._fragments = _Fragments(kind)
        fragments.add(payload, is_last=bool(first & FIN))
        if not first & FIN:
            return None
        self._fragments = None
        return fragments.kind, bytes(fragments.data)


class _Fragments:
    """The fragments of one message so far."""

    __slots__ = ("_decoder", "data", "kind")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.data = bytearray()  # not a list: they may be many, and empty
        self._decoder = codecs.getincrementaldecoder("utf-8")() if kind == TEXT else None

    def add(self, payload: bytes, *, is_last: bool) -> None:
        """Add the next one; raises `FrameError` when the text cannot become UTF-8 any more."""
        self.data += payload
        if self._decoder is None:
            return
        try:
            self._decoder.decode(payload, is_last)
        except UnicodeDecodeError as exc:
            raise FrameError(ws.BAD_TEXT_CLOSE, "the text is not UTF-8") from exc


def close_frame(code: int, reason: str = "") -> bytes:
    """Make a close frame; `reason` is cut to what fits."""
    payload = b"" if code == ws.NO_CODE_CLOSE else ws.close_payload(code, reason)
    return ws.frame_head(len(payload), ws.CLOSE) + payload


def code_of_close(payload: bytes) -> int:
    """Return the code in the payload of the peer's close frame.

    Raises `FrameError`: the code must not be sent, or the reason is not UTF-8.
    """
    if not payload:
        return ws.NO_CODE_CLOSE
    code = int.from_bytes(payload[:2], "big")
    is_known = 1000 <= code <= 1014 and code not in (1004, 1005, 1006)
    if len(payload) < 2 or not (is_known or 3000 <= code < 5000):
        raise FrameError(ws.PROTOCOL_ERROR_CLOSE, "invalid close code")
    try:
        payload[2:].decode()
    except UnicodeDecodeError as exc:
        raise FrameError(ws.BAD_TEXT_CLOSE, "the reason is not UTF-8") from exc
    return code


MESSAGES_AT_ONCE = 8  # incomplete ones of the greatest length, for which there is room


class PartialMessages:
    """The incomplete messages of the connections of one process. On the event loop only."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_message_bytes = max_message_bytes
        self._most_bytes = MESSAGES_AT_ONCE * max_message_bytes
        self._kept: dict[WebSocketProtocol, int] = {}
        self._total = 0

    def note(self, connection: WebSocketProtocol, size: int) -> None:
        """Take note of how many bytes are kept for a connection, and make room if need be."""
        self._total += size - self._kept.pop(connection, 0)
        if size:
            self._kept[connection] = size
        if self._total > self._most_bytes:  # a connection that fails notes that none are kept
            largest = max(self._kept, key=self._kept.__getitem__)
            text = f"unfinished messages take {self._total // MB} MB"
            largest.guarded(largest.fail, ws.TRY_AGAIN_LATER_CLOSE, text)
