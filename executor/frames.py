# SPDX-License-Identifier: Apache-2.0
"""JSON over a worker's pipe: four bytes of length, then the JSON.

Both ends use it; the frames are described in `worker/main.py`. A length comes first, so that a
10 MB result is parsed once, when it is complete.
"""

from __future__ import annotations

import struct
from typing import Any

import orjson

from ..system.text.units import MB
from .errors import FrameError

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size

# Beyond this a result is a file, not a message; the daemon must hold it in memory.
MAX_FRAME_BYTES = 256 * MB
MAX_RESULT_BYTES = MAX_FRAME_BYTES - MB  # leaves room for the rest of the message


def encode_frame(message: Any) -> bytes:
    """Encode `message` as one frame.

    Raises:
        TypeError: it is not JSON.
        FrameError: it is larger than `MAX_FRAME_BYTES`.
    """
    if len(body := orjson.dumps(message)) > MAX_FRAME_BYTES:
        size, most = len(body) / MB, MAX_FRAME_BYTES // MB
        raise FrameError(f"{size:,.0f} MB of JSON are too much for a pipe, which takes {most} MB")
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes | bytearray) -> int:
    """Return how long the body after this header is, in bytes.

    Raises:
        FrameError: no frame of ours is that long.
    """
    (length,) = _LENGTH.unpack_from(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes was announced")
    return int(length)


def encode_result(result: Any) -> orjson.Fragment:
    """Encode `result` once, to be put into a message as it is.

    Raises:
        TypeError: it is not JSON.
        FrameError: it is larger than `MAX_RESULT_BYTES`.
    """
    try:
        body = orjson.dumps(result)
    except TypeError as exc:
        raise TypeError(f"the operation's result is not JSON: {exc}") from exc
    if len(body) > MAX_RESULT_BYTES:
        size, most = len(body) / MB, MAX_RESULT_BYTES // MB
        raise FrameError(f"the result is {size:,.0f} MB of JSON; {most} MB can be returned")
    return orjson.Fragment(body)


class FrameReader:
    """Splits the bytes of a pipe into frames, however they arrive."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the frames that `data` completed.

        Raises:
            FrameError: the other end sent something else.
        """
        buffer, frames = self._buffer, []
        buffer += data
        while len(buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + body_length(buffer)
            if len(buffer) < end:
                break
            body = bytes(buffer[HEADER_BYTES:end])
            del buffer[:end]
            frames.append(parse_body(body))
        return frames


def parse_body(body: bytes) -> Any:
    """Parse the body of one frame.

    Raises:
        FrameError: it is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise FrameError("a frame held no JSON") from exc
