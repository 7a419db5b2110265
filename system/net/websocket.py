# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames as bytes (RFC 6455, section 5), for either side; no sockets, no extensions.

    payload ─▶ frame_head(size, key=…) ─▶ written in front of the payload
    bytes received ─▶ parse_head ─▶ opcode, where the payload begins, where the frame ends

The rules of a connection (fragments, limits, close codes) are checked elsewhere: for the server in
`env_host/websocket/frames.py`, for the client by `websockets`.
"""

from __future__ import annotations

import base64
import os
import struct
from typing import TypeAlias

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
FIN = 0x80  # in a frame's first byte: it ends its message
OPCODE = 0x0F  # the bits of the first byte that hold the opcode
MASKED = 0x80  # in the second byte: a key follows, and the payload is masked with it

NORMAL_CLOSE = 1000
GOING_AWAY_CLOSE = 1001
PROTOCOL_ERROR_CLOSE = 1002
NO_CODE_CLOSE = 1005  # never sent: the peer's close frame had no code
BAD_TEXT_CLOSE = 1007
TOO_BIG_CLOSE = 1009
INTERNAL_ERROR_CLOSE = 1011
TRY_AGAIN_LATER_CLOSE = 1013

MAX_CONTROL_BYTES = 125
_CUT = "…".encode()  # of a close reason that does not fit
KEY_BYTES = 4
NO_KEY = b"\0\0\0\0"  # a mask that leaves the payload as it is

_SIZE = 0x7F
_pack_medium_head = struct.Struct(">BBH").pack
_SIZE_BYTES = {126: 2, 127: 8}  # of a length that does not fit the second byte

Readable: TypeAlias = bytes | bytearray | memoryview
FrameHead: TypeAlias = tuple[int, bool, int, int]


def parse_head(data: Readable, at: int = 0) -> FrameHead | None:
    """Parse the head of the frame that begins at `at`.

    Returns the first byte (`FIN`, reserved bits, `OPCODE`), whether the frame is masked, where its
    payload begins (the last `KEY_BYTES` before it are the key of a masked frame), and where the
    frame ends, which may lie beyond the data. None if the head is incomplete.
    """
    here = len(data) - at
    if here < 2:
        return None
    second = data[at + 1]
    size = second & _SIZE
    payload_at = at + 2
    if size > MAX_CONTROL_BYTES:
        payload_at += _SIZE_BYTES[size]
        if len(data) < payload_at:
            return None
        size = int.from_bytes(data[at + 2 : payload_at], "big")
    if second & MASKED:
        payload_at += KEY_BYTES
        return data[at], True, payload_at, payload_at + size
    return data[at], False, payload_at, payload_at + size


def least_head_bytes(payload_bytes: int) -> int:
    """Return how long the head of an unmasked frame is; a longer one breaks the protocol."""
    if payload_bytes <= MAX_CONTROL_BYTES:
        return 2
    return 4 if payload_bytes < 1 << 16 else 10


def frame_head(payload_bytes: int, opcode: int = TEXT, key: bytes = b"") -> bytes:
    """Make the head of an unfragmented frame; clients must mask the payload with a `key`."""
    masked = MASKED if key else 0
    if payload_bytes <= MAX_CONTROL_BYTES:
        return bytes((FIN | opcode, masked | payload_bytes)) + key
    if payload_bytes < 1 << 16:
        return _pack_medium_head(FIN | opcode, masked | 126, payload_bytes) + key
    return bytes((FIN | opcode, masked | 127)) + payload_bytes.to_bytes(8, "big") + key


def unmasked_client_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """Make a client's frame with a zero key, for measurements without a proxy."""
    return frame_head(len(payload), opcode, NO_KEY) + payload


def close_payload(code: int, reason: str = "") -> bytes:
    """Make the payload of a close frame; a long reason is cut after a word, and ends with `…`."""
    text, room = reason.encode(), MAX_CONTROL_BYTES - 2
    if len(text) > room:
        kept = text[: room - len(_CUT)].decode(errors="ignore")
        text = (kept.rpartition(" ")[0] or kept).encode() + _CUT
    return code.to_bytes(2, "big") + text


def upgrade_request(authority: str, path: str, headers: str = "") -> bytes:
    """Make a client's request for a WebSocket; each of the `headers` ends with its line end."""
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
        f"{headers}\r\n"
    ).encode()
