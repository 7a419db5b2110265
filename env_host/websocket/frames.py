# SPDX-License-Identifier: Apache-2.0
"""The messages in the bytes that a WebSocket client sends: a server's side, no sockets.

    bytes received ──▶ FrameParser.feed ──▶ [(TEXT, payload), (PING, payload), …]

Fragmented messages are returned whole. A breach of the protocol raises `FrameError`, which carries
what the close frame is to say. Whether a text is UTF-8 is left to the JSON parser, which looks
anyway. The heads of frames are in `system/websocket.py`; why this is not a library's: see
`docs/decisions/0009-own-websocket-framing.md`.
"""

from __future__ import annotations

from ...system.websocket import (
    BAD_TEXT_CLOSE,
    BINARY,
    CLOSE,
    CONTINUATION,
    FIN,
    KEY_BYTES,
    MASKED,
    MAX_CONTROL_BYTES,
    NO_CODE_CLOSE,
    OPCODE,
    PING,
    PONG,
    PROTOCOL_ERROR_CLOSE,
    TEXT,
    TOO_BIG_CLOSE,
    close_payload,
    frame_head,
    parse_head,
)

try:
    from websockets.speedups import apply_mask
except ImportError:  # no wheel for this Python
    from ...system.websocket import apply_mask

_WHOLE_TEXT = FIN | TEXT
_RESERVED = 0x70
_CONTROL = 0x8  # opcodes from here on
_LARGE_BYTES = 1 << 16  # from here on a slice is not worth its copy
_OPCODES = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))

Message = tuple[int, bytes]


class FrameError(Exception):
    """The peer broke the protocol; `code` and `reason` go into our close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class FrameParser:
    """Parses the bytes of one connection into messages of at most `max_bytes` each."""

    __slots__ = ("_chunks", "_fragments", "_held", "_kind", "_max_bytes", "_wanted")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] | None = None  # of a frame that has not arrived whole
        self._held = 0  # bytes in them
        self._wanted = 0  # bytes without which it is not worth looking again
        self._fragments: bytearray | None = None  # of a message in several frames
        self._kind = 0  # of that message

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`, and the control frames between them.

        Raises:
            FrameError: the peer broke the protocol; messages before the breach are lost with it.
        """
        if self._chunks is not None:
            self._chunks.append(data)
            self._held += len(data)
            if self._held < self._wanted:
                return []
            data = b"".join(self._chunks)
            self._chunks = None
        found: list[Message] = []
        position, end = 0, len(data)
        while position < end:
            head = parse_head(data, position)
            if head is None:
                self._keep_start(data[position:])
                break
            first, is_masked, payload_at, stop = head
            if first != _WHOLE_TEXT or not is_masked or stop - payload_at > self._max_bytes:
                self._check(first, is_masked, stop - payload_at)
            if stop > end:
                self._keep(data[position:] if position else data, stop - position)
                break
            key = data[payload_at - KEY_BYTES : payload_at]
            if stop - payload_at < _LARGE_BYTES:
                payload = apply_mask(data[payload_at:stop], key)
            else:
                payload = apply_mask(memoryview(data)[payload_at:stop], key)
            if first == _WHOLE_TEXT and self._fragments is None:
                found.append((TEXT, payload))
            elif message := self._message(first, payload):
                found.append(message)
            position = stop
        return found

    def _check(self, first: int, is_masked: bool, size: int) -> None:
        if not is_masked:
            raise FrameError(PROTOCOL_ERROR_CLOSE, "a client must mask its frames")
        if first & _RESERVED or first & OPCODE not in _OPCODES:
            raise FrameError(PROTOCOL_ERROR_CLOSE, "reserved bits or opcode")
        if first & _CONTROL and (size > MAX_CONTROL_BYTES or not first & FIN):
            raise FrameError(PROTOCOL_ERROR_CLOSE, "control frame too long or fragmented")
        if size > self._max_bytes:
            raise FrameError(TOO_BIG_CLOSE, f"more than {self._max_bytes} bytes")

    def _keep_start(self, data: bytes) -> None:
        """Keep a head that is incomplete, unless two bytes of it show that it is wrong."""
        if len(data) > 1:
            self._check(data[0], bool(data[1] & MASKED), data[1] & ~MASKED)
        self._keep(data, len(data) + 1)

    def _keep(self, data: bytes, wanted: int) -> None:
        self._chunks = [data]
        self._held = len(data)
        self._wanted = wanted

    def _message(self, first: int, payload: bytes) -> Message | None:
        """Return the message that a frame completes; None for a fragment before the last."""
        kind = first & OPCODE
        if kind & _CONTROL:
            return kind, payload
        if (kind == CONTINUATION) is (self._fragments is None):
            raise FrameError(PROTOCOL_ERROR_CLOSE, "a fragment out of order")
        if first & FIN and self._fragments is None:
            return kind, payload
        return self._join(kind, payload, last=bool(first & FIN))

    def _join(self, kind: int, payload: bytes, *, last: bool) -> Message | None:
        if self._fragments is None:
            self._fragments, self._kind = bytearray(), kind
        self._fragments += payload  # not in a list: they may be many, and empty
        if len(self._fragments) > self._max_bytes:
            raise FrameError(TOO_BIG_CLOSE, f"more than {self._max_bytes} bytes")
        if not last:
            return None
        whole, self._fragments = bytes(self._fragments), None
        return self._kind, whole


def close_frame(code: int, reason: str = "") -> bytes:
    """Make a close frame; `reason` is cut to what fits."""
    payload = b"" if code == NO_CODE_CLOSE else close_payload(code, reason)
    return frame_head(len(payload), CLOSE) + payload


def code_of_close(payload: bytes) -> int:
    """Return the code in the payload of the peer's close frame.

    Raises:
        FrameError: the code must not be sent, or the reason is not UTF-8.
    """
    if not payload:
        return NO_CODE_CLOSE
    code = int.from_bytes(payload[:2], "big")
    if len(payload) < 2 or not _may_be_sent(code):
        raise FrameError(PROTOCOL_ERROR_CLOSE, "invalid close code")
    try:
        payload[2:].decode()
    except UnicodeDecodeError as exc:
        raise FrameError(BAD_TEXT_CLOSE, "the reason is not UTF-8") from exc
    return code


def _may_be_sent(code: int) -> bool:
    return 3000 <= code < 5000 or (1000 <= code <= 1014 and code not in (1004, 1005, 1006))
