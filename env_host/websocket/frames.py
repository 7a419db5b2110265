# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames as bytes (RFC 6455), without a socket: a server's side, no extensions.

    bytes as they come ──▶ FrameParser.feed ──▶ [(TEXT, payload), (PING, payload), …]
    payload ──▶ head_of_frame ──▶ what to write in front of it

Messages in fragments come out whole. What breaks the protocol raises `FrameError`, which says what
to tell the peer. Whether a text is UTF-8 is left to whoever reads it: a JSON parser looks anyway.

Why not a library's: a frame that arrives whole, as nearly all do, costs one call and no state
here. Measured as bare echo servers on uvloop (`load_tests/protocols.py`): `websockets`' sans-I/O
protocol takes 2.4 times the CPU for a session and 4 kB more; `picows` is as quick for a message,
but takes a session 1.3 to 1.9 times the CPU and 7 to 12 kB more, and has to be compiled for every
project's Python. The unmasking is the library's, in C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA

NORMAL_CLOSE = 1000
GOING_AWAY_CLOSE = 1001
PROTOCOL_ERROR_CLOSE = 1002
NO_CODE_CLOSE = 1005  # never on the wire: the peer's close frame said nothing
BAD_TEXT_CLOSE = 1007
TOO_BIG_CLOSE = 1009
INTERNAL_ERROR_CLOSE = 1011

_FIN = 0x80
_RESERVED = 0x70
_MASKED = 0x80
_SIZE = 0x7F
_MASK_BYTES = 4
_CONTROL = 0x8  # opcodes from here on
_MAX_CONTROL_BYTES = 125
_LARGE = 1 << 16  # from here on a slice is not worth its copy
_OPCODES = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))

Message = tuple[int, bytes]


class FrameError(Exception):
    """The peer broke the protocol; `code` goes into our close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def _mask_in_python(data: Any, mask: Any) -> bytes:
    """`data` with `mask` laid over it, four bytes at a time, as one large number."""
    size = len(data)
    key = (bytes(mask) * (size // _MASK_BYTES + 1))[:size]
    return (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")


def _find_unmask() -> Callable[[Any, Any], bytes]:
    try:
        from websockets.speedups import apply_mask
    except ImportError:  # no wheel for this Python
        return _mask_in_python
    return apply_mask


unmask = _find_unmask()


class FrameParser:
    """Turns the bytes of one connection into messages."""

    __slots__ = ("_chunks", "_fragments", "_held", "_kind", "_max_bytes", "_wanted")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] | None = None  # of a frame that has not arrived whole
        self._held = 0  # bytes in them
        self._wanted = 0  # bytes without which it is not worth looking again
        self._fragments: bytearray | None = None  # of a message in several frames
        self._kind = 0  # of that message

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`, and the control frames between them.

        Raises:
            FrameError: the peer broke the protocol; what came before it is lost with it.
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
            payload_at, stop = self._bounds(data, position)
            if stop > end:
                self._keep(data[position:] if position else data, stop - position)
                break
            mask = data[payload_at - _MASK_BYTES : payload_at]
            if stop - payload_at < _LARGE:
                payload = unmask(data[payload_at:stop], mask)
            else:
                payload = unmask(memoryview(data)[payload_at:stop], mask)
            first = data[position]
            if first == _FIN | TEXT and self._fragments is None:
                found.append((TEXT, payload))
            elif message := self._message(first, payload):
                found.append(message)
            position = stop
        return found

    def _bounds(self, data: bytes, start: int) -> tuple[int, int]:
        """Where the payload of the frame at `start` begins and ends; further than there are bytes
        if its head is not there yet."""
        if len(data) < start + 2:
            return start + 2, start + 2
        first, second = data[start], data[start + 1]
        if not second & _MASKED:
            raise FrameError(PROTOCOL_ERROR_CLOSE, "a client must mask its frames")
        if first & _RESERVED or first & 0xF not in _OPCODES:
            raise FrameError(PROTOCOL_ERROR_CLOSE, "reserved bits or opcode")
        size = second & _SIZE
        payload_at = start + 2 + _MASK_BYTES
        if first & _CONTROL and (size > _MAX_CONTROL_BYTES or not first & _FIN):
            raise FrameError(PROTOCOL_ERROR_CLOSE, "control frame too long or fragmented")
        if size > _MAX_CONTROL_BYTES:
            more = 2 if size == 126 else 8
            payload_at += more
            if len(data) < payload_at:
                return payload_at, payload_at
            size = int.from_bytes(data[start + 2 : start + 2 + more], "big")
        if size > self._max_bytes:
            raise FrameError(TOO_BIG_CLOSE, f"more than {self._max_bytes} bytes")
        return payload_at, payload_at + size

    def _keep(self, data: bytes, wanted: int) -> None:
        self._chunks = [data]
        self._held = len(data)
        self._wanted = wanted

    def _message(self, first: int, payload: bytes) -> Message | None:
        """What a frame other than a whole text makes: a message, or part of one."""
        kind = first & 0xF
        if kind & _CONTROL:
            return kind, payload
        if (kind == CONTINUATION) is (self._fragments is None):
            raise FrameError(PROTOCOL_ERROR_CLOSE, "a fragment out of order")
        if first & _FIN and self._fragments is None:
            return kind, payload
        return self._join(kind, payload, last=bool(first & _FIN))

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


def head_of_frame(size: int, kind: int = TEXT) -> bytes:
    """What stands before a payload of `size` bytes that is sent whole."""
    if size <= _MAX_CONTROL_BYTES:
        return bytes((_FIN | kind, size))
    if size < _LARGE:
        return bytes((_FIN | kind, 126)) + size.to_bytes(2, "big")
    return bytes((_FIN | kind, 127)) + size.to_bytes(8, "big")


def close_frame(code: int, reason: str = "") -> bytes:
    """A close frame; `reason` is cut to what fits."""
    if code == NO_CODE_CLOSE:
        return head_of_frame(0, CLOSE)
    said = reason.encode()[: _MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()
    return head_of_frame(len(said) + 2, CLOSE) + code.to_bytes(2, "big") + said


def code_of_close(payload: bytes) -> int:
    """The code in the payload of the peer's close frame.

    Raises:
        FrameError: it is none that may be sent, or its reason is no text.
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
