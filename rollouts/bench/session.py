# SPDX-License-Identifier: Apache-2.0
"""`Connection`, a client's WebSocket as light as Python allows; on it `Session`, a measured one.

    connect ─▶ upgrade ─▶ reset ─▶ step ─▶ close message, close frame ─▶ the server's close

Written by hand (docs/decisions/0019-bench-sessions.md): every session of a batch sends the same
bytes, which are made once, so that a session costs one connection, five writes and as many reads.
The mask is zero, which leaves a payload as it is; masks protect proxies, and there are none here.

The total and the connect time count from the start of the batch, not from when this process began
the session: a generator that is late must not look like a server that is quick.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import orjson

from ...system.net.websocket import (
    CLOSE,
    FIN,
    NO_CODE_CLOSE,
    NORMAL_CLOSE,
    OPCODE,
    PING,
    PONG,
    close_payload,
    parse_head,
    unmasked_client_frame,
)
from ...system.text.json_lines import Json

MAX_MESSAGE_CHARS = 300  # of an error
RESET = unmasked_client_frame(b'{"type":"reset","data":{}}')
CLOSE_FRAME = unmasked_client_frame(close_payload(NORMAL_CLOSE), CLOSE)
_CLOSING = unmasked_client_frame(b'{"type":"close"}') + CLOSE_FRAME


class Connection(asyncio.Protocol):
    """One connection. A subclass defines what follows on each event: the methods `on_…`.

    Args:
        opening: The request for the upgrade (`upgrade_request`).

    Attributes:
        is_closed: It was closed here, and what else the server sends is not read.
    """

    def __init__(self, opening: bytes) -> None:
        self.is_closed = False
        self._transport: asyncio.Transport | None = None
        self._opening = opening
        self._is_open = False
        self._unread = b""
        self._text = b""  # of a message in several frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade, unless the connection was closed while it was made."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        if self.is_closed:
            transport.close()
        else:
            self.write(self._opening)

    def data_received(self, data: bytes) -> None:
        """Read the answer to the upgrade, then frames."""
        data = self._unread + data if self._unread else data
        start = 0
        if not self._is_open:
            if (end := data.find(b"\r\n\r\n")) < 0:
                self._unread = data
                return
            head = data[:end].decode("latin-1")
            if not head.startswith("HTTP/1.1 101"):
                self.on_refused(head.partition("\r\n")[0])
                self.close()
                return
            self._is_open, start = True, end + 4
            self.on_open(head)
        while not self.is_closed and (found := parse_frame(data, start)) is not None:
            opcode, is_last, payload, start = found
            if opcode == PING:
                self.write(unmasked_client_frame(payload, PONG))
            elif opcode == CLOSE:
                code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else NO_CODE_CLOSE
                self.on_close(code, payload[2:].decode("utf-8", "replace"))
            elif opcode != PONG:
                self._text += payload
                if is_last:
                    text, self._text = self._text, b""
                    self.on_message(text)
        self._unread = data[start:]

    def write(self, data: bytes) -> None:
        """Send bytes."""
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def on_open(self, head: str) -> None:
        """React to the head of the answer that grants the upgrade."""

    def on_refused(self, line: str) -> None:
        """React to the first line of another answer."""

    def on_message(self, text: bytes) -> None:
        """React to a whole message."""

    def on_close(self, code: int, reason: str) -> None:
        """React to the server's close frame."""


@dataclass(slots=True)
class Outcome:
    """The result of one session; latencies are None for phases it did not get through."""

    connect_seconds: float | None = None
    reset_seconds: float | None = None
    step_seconds: float | None = None
    total_seconds: float = 0.0
    observation: Json | None = None
    error_kind: str | None = None
    error_message: str | None = None


class Session(Connection):
    """One connection from its first byte to its last.

    Args:
        opening: The request for the upgrade.
        step: The frame of the step.
        on_admitted: Called once, when the server has granted the upgrade or the session has ended:
            another handshake may begin.

    Attributes:
        over: Done when the session has ended, well or not. It ends once.
        started_at: The start of the batch.
        phase_began_at: The start of the batch, then the end of the last phase.
    """

    def __init__(self, opening: bytes, step: bytes, on_admitted: Callable[[], None]) -> None:
        super().__init__(opening)
        self.outcome = Outcome()
        self.over = asyncio.get_running_loop().create_future()
        self.started_at = self.phase_began_at = 0.0
        self._step = step
        self._on_admitted = on_admitted

    def on_open(self, head: str) -> None:
        """Ask for a reset."""
        self.outcome.connect_seconds = self._end_phase()
        self._on_admitted()
        self.write(RESET)

    def on_message(self, text: bytes) -> None:
        """Read the answer to the reset or to the step, and send what comes next."""
        try:
            message = orjson.loads(text)
            data = message.get("data") or {}
            if message.get("type") == "error":
                self.fail(str(data.get("code", "error")), str(data.get("message", "")))
            elif self.outcome.reset_seconds is None:
                self.outcome.reset_seconds = self._end_phase()
                self.write(self._step)
            elif self.outcome.step_seconds is None:
                self.outcome.observation = data["observation"]
                self.outcome.step_seconds = self._end_phase()
                self.write(_CLOSING)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.fail("not_openenv", f"not an answer of an environment: {text[:200]!r}")

    def on_refused(self, line: str) -> None:
        """Fail: there is no session."""
        self.fail("refused", f"the upgrade was answered with {line}")

    def on_close(self, code: int, reason: str) -> None:
        """Record the server's close frame."""
        self._end("closed", f"the server closed with {code} {reason}".rstrip())

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end of the connection."""
        cause = f": {exc}" if exc else ""
        self._end("connection_lost", f"the server closed the connection{cause}")

    def fail(self, kind: str, message: str) -> None:
        """End it as a failure, unless it has ended."""
        if not self.over.done():
            self.outcome.error_kind = kind
            self.outcome.error_message = message[:MAX_MESSAGE_CHARS]
            self.outcome.total_seconds = time.monotonic() - self.started_at
            self.over.set_result(None)
            if self.outcome.connect_seconds is None:
                self._on_admitted()
            self.close()

    def _end(self, kind: str, message: str) -> None:
        """End it because the server has; a failure only if the step is unanswered."""
        is_answered = self.outcome.step_seconds is not None and self.outcome.error_kind is None
        self.fail(kind, message)
        if is_answered:
            self.outcome.error_kind = self.outcome.error_message = None

    def _end_phase(self) -> float:
        """Return how long the phase took that ends now."""
        now = time.monotonic()
        seconds, self.phase_began_at = now - self.phase_began_at, now
        return seconds


def parse_frame(data: bytes, start: int) -> tuple[int, bool, bytes, int] | None:
    """Parse the server's frame that begins at `start`; None while it is incomplete.

    Returns:
        Opcode, whether the frame ends its message, payload, and where the frame ends.
    """
    if (head := parse_head(data, start)) is None or len(data) < head[3]:
        return None
    first, _, payload_at, end = head
    return first & OPCODE, first >= FIN, data[payload_at:end], end
