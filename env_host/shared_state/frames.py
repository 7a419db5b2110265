# SPDX-License-Identifier: Apache-2.0
"""The frames between a shard and the state process, how many may be in flight, and both ends.

    header (40 bytes, little-endian) │ method name │ value, as JSON │ body, raw

`length` counts what follows the header, and must agree with the three lengths it is made of: that,
the kind and the limits distinguish a frame from garbage.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, cast

from ...system.units import MB
from .errors import BodyTooLarge, WireError

HEADER = struct.Struct("<IBBHIIIIQQ")
MAX_VALUE_BYTES = 16 * MB  # of JSON in one frame
MAX_BODY_BYTES = 256 * MB  # of one body; a WebSocket message of 100 MB fits
READ_BYTES = 256 * 1024  # most bytes of one read
AHEAD_BYTES = 4 * MB  # a longer frame is received into a buffer that grows with it
GROWTH = 4  # each time
_JOIN_BYTES = 16 * 1024  # larger frames are written as they are, uncopied

# Flags. Plain ints: an `IntFlag` costs a microsecond at each use.
HAS_BODY = 1
HAS_VALUE = 2

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Limits:
    """The limits of one shard's connection."""

    max_calls: int = 1024  # sent and not answered; the others wait in the shard
    max_bytes: int = 32 * MB  # of bodies in those; a larger body goes alone
    max_waiting: int = 65_536  # calls that wait to be sent; one more is refused at once
    connect_seconds: float = 10.0  # for the first connection
    greeting_seconds: float = 5.0  # between connect and HELLO, or HELLO and WELCOME
    retry_seconds: float = 0.05  # between two attempts to connect again

    def has_room(self, calls: int, in_flight_bytes: int, body_bytes: int) -> bool:
        """Return whether a call with such a body may be sent now."""
        if calls == 0:
            return True
        return calls < self.max_calls and in_flight_bytes + body_bytes <= self.max_bytes


DEFAULT_LIMITS = Limits()


class Kind(IntEnum):
    """The kind of a frame; C: client (a shard) to state process, S: the other way."""

    HELLO = 1  # C  once: the shard's name
    WELCOME = 2  # S  once: the epoch that every later frame must carry
    CALL = 3  # C  one call of a method
    REPLY = 4  # S  its result
    FAILURE = 5  # S  or why there is none
    LEAVE = 6  # C  a session is over


_FIRST_KIND, _LAST_KIND = int(Kind.HELLO), int(Kind.LEAVE)


class Frame(NamedTuple):
    """A decoded frame; `body` is None when it has none."""

    kind: int
    flags: int
    epoch: int
    session: int
    request_id: int
    deadline_us: int  # of the monotonic clock, which all processes of a machine share; 0: none
    name: str
    value: Any
    body: bytes | None


def encode(
    kind: Kind,
    *,
    epoch: int = 0,
    session: int = 0,
    request_id: int = 0,
    deadline_us: int = 0,
    name: bytes = b"",
    value: bytes = b"",
    body: Buffer | None = None,
    flags: int = 0,
) -> bytes:
    """Return header, name, value and body as the bytes of one frame."""
    body_bytes = 0 if body is None else len(body)
    length = len(name) + len(value) + body_bytes
    if body is not None:
        flags |= HAS_BODY
    head = HEADER.pack(
        length,
        kind,
        flags,
        len(name),
        epoch,
        session,
        len(value),
        body_bytes,
        request_id,
        deadline_us,
    )
    return b"".join((head, name, value, body or b""))


def encode_value(value: Any) -> bytes:
    """Encode a value as JSON.

    Raises:
        TypeError, ValueError: The value has no JSON form.
        BodyTooLarge: It is too long; large data belongs into the body.
    """
    data = _dump(value)
    if len(data) > MAX_VALUE_BYTES:
        raise BodyTooLarge(
            f"{len(data)} bytes of JSON are more than {MAX_VALUE_BYTES}; pass large data as bytes"
        )
    return data


class Incoming:
    """Splits received bytes into frames; the buffer of one connection.

    Read into `room()`, then iterate over `frames(count)`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(READ_BYTES)
        self._start = 0  # of the first byte that is in no frame yet
        self._end = 0

    def room(self) -> memoryview:
        """Return the buffer to read into; never empty."""
        if self._start == self._end:
            self._start = self._end = 0
        if len(self._buffer) - self._end < READ_BYTES // 2:
            self._move()
        return memoryview(self._buffer)[self._end :]

    def frames(self, count: int) -> Iterator[Frame]:
        """Yield frames complete with `count` more bytes; `WireError` when the stream is broken."""
        self._end += count
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        start, available = self._start, self._end - self._start
        if available < HEADER.size:
            return None
        header = HEADER.unpack_from(self._buffer, start)
        length = _checked_length(header)
        if available < HEADER.size + length:
            return None
        frame = _decode(header, self._buffer, start + HEADER.size)
        self._start = start + HEADER.size + length
        return frame

    def _move(self) -> None:
        """Move an unfinished frame to the front of a buffer that can hold more of it.

        Not all of it at once: what is announced may never come.
        """
        unfinished = self._buffer[self._start : self._end]
        size = READ_BYTES
        if len(unfinished) >= HEADER.size:
            size += HEADER.size + _checked_length(HEADER.unpack_from(unfinished))
        most = max(AHEAD_BYTES, GROWTH * len(unfinished))
        self._buffer = bytearray(max(min(size, most), len(unfinished) + READ_BYTES))
        self._buffer[: len(unfinished)] = unfinished
        self._start, self._end = 0, len(unfinished)


class WireProtocol(asyncio.BufferedProtocol):
    """One end of a connection: frames come to `_handle`, and leave by `send`.

    The frames of one iteration of the loop leave in one write: a system call is the largest part of
    the cost of a small call. None leaves before the connection is made and after it is lost.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._incoming = Incoming()
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        """Send a frame with all others of this iteration."""
        if self._transport is None:
            return
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into."""
        return self._incoming.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is complete; a peer that breaks the protocol is left."""
        try:
            for frame in self._incoming.frames(nbytes):
                if self._transport is None:
                    return
                self._handle(frame)
        except WireError as exc:
            self._note_fault(exc)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop all frames."""
        self._transport = None
        self._frames.clear()

    def _handle(self, frame: Frame) -> None:
        raise NotImplementedError

    def _note_fault(self, exc: WireError) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self._transport is None:
            return
        small: list[bytes] = []
        for frame in frames:
            if len(frame) <= _JOIN_BYTES:
                small.append(frame)
                continue
            self._write(small)
            small = []
            self._transport.write(frame)
        self._write(small)

    def _write(self, frames: list[bytes]) -> None:
        if frames and self._transport is not None:
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))


def _checked_length(header: tuple[int, ...]) -> int:
    length, kind, _, name_bytes, _, _, value_bytes, body_bytes, _, _ = header
    if (
        length != name_bytes + value_bytes + body_bytes
        or not _FIRST_KIND <= kind <= _LAST_KIND
        or value_bytes > MAX_VALUE_BYTES
        or body_bytes > MAX_BODY_BYTES
    ):
        raise WireError("the received bytes are not a frame")
    return length


def _decode(header: tuple[int, ...], data: bytearray, at: int) -> Frame:
    _, kind, flags, name_bytes, epoch, session, value_bytes, body_bytes, request_id, deadline = (
        header
    )
    try:
        name = data[at : at + name_bytes].decode()
        at += name_bytes
        value = _load(data[at : at + value_bytes]) if value_bytes else None
    except ValueError as exc:
        raise WireError(f"a frame with invalid text: {exc}") from exc
    at += value_bytes
    body = None
    if flags & HAS_BODY:
        body = bytes(memoryview(data)[at : at + body_bytes])
    return Frame(kind, flags, epoch, session, request_id, deadline, name, value, body)


def _json_functions() -> tuple[Callable[[Any], bytes], Callable[[bytes | bytearray], Any]]:
    """Choose the fastest: a project's own Python has pydantic for certain, orjson perhaps."""
    try:
        import orjson
    except ImportError:
        from pydantic_core import from_json, to_json

        return to_json, from_json
    return orjson.dumps, orjson.loads


_dump, _load = _json_functions()
