# SPDX-License-Identifier: Apache-2.0
"""The frames between a shard and the state process, and what both ends do with them.

    header (28 bytes, little-endian) │ value, as JSON │ body, raw

    kind      from       value                           body
    WELCOME   state      its pid; the first frame of all
    CALL      shard      [method, deadline, arguments]   the call's bytes, if it has any
    REPLY     state      the result, unless it is bytes  its bytes, if it has any
    FAILURE   state      [type, message]
    LEAVE     shard      (a session is over)

Kind, epoch and the limits of lengths distinguish a frame from garbage.

The errors between a session and the state that it shares:

HostError
├── WorldError                what a call of `self.world` raises: it fails only the step
│   ├── WorldCallFailed       the state's method raised
│   ├── WorldTimeout          no reply in time: the call may have had effects
│   │   └── WorldBusy         it was never sent: too much is in flight
│   ├── BodyTooLarge          more bytes than one call may carry; it was not sent
│   └── WorldLost             the state is gone, and with it what the session did there
├── SessionEnded
│   └── WorldLost             … so the session is ended too: error frame, close 1011
└── WireError                 the peer sent an invalid frame: its connection is closed
"""

from __future__ import annotations

import asyncio
import logging
import struct
from enum import IntEnum
from typing import Any, NamedTuple, cast

from pydantic_core import from_json, to_json

from ...system.net.websocket import INTERNAL_ERROR_CLOSE
from ...system.text.units import MB
from ..errors import HostError, SessionEnded

# Kind, whether there is a body, epoch, session, bytes of the value and of the body, request id.
HEADER = struct.Struct("<B?xxIIIIQ")
MAX_VALUE_BYTES = 16 * MB  # of JSON in one frame
MAX_BODY_BYTES = 256 * MB  # of one body; a WebSocket message of 100 MB fits

log = logging.getLogger("openenvd.env_host")

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The kind of a frame."""

    WELCOME = 1
    CALL = 2
    REPLY = 3
    FAILURE = 4
    LEAVE = 5


class Frame(NamedTuple):
    """A decoded frame; `body` is None when it has none."""

    kind: int
    epoch: int
    session: int
    request_id: int
    has_value: bool
    value: Any
    body: bytes | None
    size: int  # of all its bytes


def encode(
    kind: Kind,
    epoch: int,
    session: int = 0,
    request_id: int = 0,
    value: bytes = b"",
    body: Buffer | None = None,
) -> bytes:
    """Return the bytes of one frame. Raises `BodyTooLarge`."""
    has_body, body = body is not None, body or b""
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"a body of {len(body)} bytes is more than {MAX_BODY_BYTES}")
    head = HEADER.pack(kind, has_body, epoch, session, len(value), len(body), request_id)
    return b"".join((head, value, body))


def decode(data: bytearray, at: int = 0) -> Frame | None:
    """Return the frame that begins at `at`, or None until it is complete. Raises `WireError`."""
    if len(data) - at < HEADER.size:
        return None
    head = HEADER.unpack_from(data, at)
    kind, has_body, epoch, session, value_bytes, body_bytes, request_id = head
    is_known = Kind.WELCOME <= kind <= Kind.LEAVE
    if not is_known or value_bytes > MAX_VALUE_BYTES or body_bytes > MAX_BODY_BYTES:
        raise WireError("the received bytes are not a frame")
    body_at = at + HEADER.size + value_bytes
    end = body_at + body_bytes
    if len(data) < end:
        return None
    try:
        value = from_json(data[at + HEADER.size : body_at]) if value_bytes else None
    except ValueError as exc:
        raise WireError(f"a frame with invalid JSON: {exc}") from exc
    body = bytes(memoryview(data)[body_at:end]) if has_body else None
    return Frame(kind, epoch, session, request_id, value_bytes > 0, value, body, end - at)


def encode_value(value: Any) -> bytes:
    """Encode a value as JSON. Raises `ValueError` if JSON cannot express it, or `BodyTooLarge`."""
    data = to_json(value)
    if len(data) > MAX_VALUE_BYTES:
        raise BodyTooLarge(
            f"{len(data)} bytes of JSON are more than {MAX_VALUE_BYTES}; pass large data as bytes"
        )
    return data


class WireProtocol(asyncio.Protocol):
    """One end of a connection: frames come to `_handle`, and leave by `send` while it is open."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.fault: WireError | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle every complete frame; disconnect a peer that breaks the protocol."""
        self._received += data
        at = 0
        try:
            while self._transport is not None and (frame := decode(self._received, at)) is not None:
                at += frame.size
                self._handle(frame)
        except WireError as exc:
            log.warning("shared state: %s; the connection is closed", exc)
            self.fault = exc
            self.close()
        del self._received[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the transport."""
        self._transport = None

    def _handle(self, frame: Frame) -> None:
        raise NotImplementedError


class WorldError(HostError):
    """A call of the shared state failed."""


class WorldCallFailed(WorldError):
    """The method itself raised, or there is no method of that name."""


class WorldTimeout(WorldError):
    """There was no reply in time; the call is not sent again, as it may have had effects."""


class WorldBusy(WorldTimeout):
    """The call was not sent: too many or too large calls are in flight."""


class BodyTooLarge(WorldError):
    """A call or reply has more bytes than allowed."""


class WorldLost(WorldError, SessionEnded):
    """The state process, or the way to it, is gone. Nothing is known of calls in flight."""

    def __init__(self, reason: str) -> None:
        SessionEnded.__init__(self, reason, INTERNAL_ERROR_CLOSE)


class WireError(HostError):
    """The peer sent no valid frame, or one that is not allowed here."""
