# SPDX-License-Identifier: Apache-2.0
"""One measured session, as light as Python allows, over one of two protocols.

    ws     connect ─▶ upgrade ─▶ reset ─▶ step ─▶ close message, close frame ─▶ the server's close
    http   connect ─▶ `POST /reset` ─▶ `POST /step`, on one kept connection

Written by hand: the client sends the same bytes in every session, made once per batch (`Script`),
so that a session costs one connection, five writes and as many reads. The mask is zero, which
leaves a payload as it is; masks protect proxies, of which there are none here. OpenEnv's HTTP
routes keep nothing between calls: over HTTP requests are measured, not sessions, and there is
nothing to hold between reset and step.

The total counts from the start of the batch, and so does connecting: not from when this process
began the session. A generator that is late must not look like a server that is quick.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from ..system.websocket import (
    CLOSE,
    CONTINUATION,
    FIN,
    NO_CODE_CLOSE,
    NORMAL_CLOSE,
    OPCODE,
    PING,
    PONG,
    TEXT,
    close_payload,
    parse_head,
    unmasked_client_frame,
    upgrade_request,
)

Json = dict[str, Any]

MAX_MESSAGE_CHARS = 300  # of an error
MAX_HEAD_BYTES = 64 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


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
    retransmits: int = 0  # of the kernel: a handshake that found the server's queue full


@dataclass(frozen=True, slots=True)
class Script:
    """The bytes that every session of a batch sends to one server."""

    opening: bytes
    reset: bytes
    step: bytes
    closing: bytes


class Session(asyncio.Protocol):
    """One connection from its first byte to its last.

    Args:
        on_admitted: Called once, when the server has sent something or the session has ended:
            another handshake may begin.

    Attributes:
        over: Done when the session has ended, well or not. It ends once.
        is_admitted: `on_admitted` was called.
        is_held: It was reset, and waits to be released.
        dialled_at: When its own connection was begun.
    """

    def __init__(
        self, script: Script, on_admitted: Callable[[], None], *, hold: bool = False
    ) -> None:
        self.outcome = Outcome()
        self.over = asyncio.get_running_loop().create_future()
        self.is_admitted = False
        self.is_held = False
        self.dialled_at = math.inf
        self.script = script
        self._on_admitted = on_admitted
        self._hold = hold
        self._started_at = self._began = 0.0
        self._unread = b""
        self._transport: asyncio.Transport | None = None

    def start(self, started_at: float) -> None:
        """Count from then on."""
        self._started_at = self._began = started_at

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first message of the session."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        if self.over.done():  # out of time meanwhile
            transport.close()
        else:
            self.write(self.script.opening)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record how the session ended."""
        if self.outcome.step_seconds is not None:
            self.end()  # not the politest end, but the session had all it came for
        self.fail("connection_lost", f"the server closed the connection{f': {exc}' if exc else ''}")

    def fail(self, kind: str, message: str) -> None:
        """End it as a failure, unless it has ended."""
        if not self.over.done():
            self.outcome.error_kind = kind
            self.outcome.error_message = message[:MAX_MESSAGE_CHARS]
            self.end()

    def end(self) -> None:
        """Record the total time, and close the connection."""
        if self.over.done():
            return
        self.outcome.total_seconds = time.monotonic() - self._started_at
        self.over.set_result(None)
        self.was_admitted()
        if self._transport is not None:
            self._transport.close()

    def release(self) -> None:
        """Let a session that is held continue."""
        if self.is_held and not self.over.done():
            self.is_held = False
            self._began = time.monotonic()
            self.write(self.script.step)

    def write(self, data: bytes) -> None:
        """Send bytes."""
        assert self._transport is not None
        self._transport.write(data)

    def was_admitted(self) -> None:
        """Let another handshake begin."""
        if not self.is_admitted:
            self.is_admitted = True
            self._on_admitted()

    def phase_over(self) -> float:
        """Return how long the phase took that ends now."""
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        return seconds

    def answered(self, body: bytes) -> None:
        """Read the answer to the reset or to the step, and send what comes next."""
        try:
            message = orjson.loads(body)
            if message.get("type") == "error":
                data = message.get("data") or {}
                self.fail(str(data.get("code", "error")), str(data.get("message", "")))
            elif self.outcome.reset_seconds is None:
                self.outcome.reset_seconds = self.phase_over()
                self.is_held = self._hold
                if not self._hold:
                    self.write(self.script.step)
            elif self.outcome.step_seconds is None:
                self.outcome.observation = message.get("data", message)["observation"]
                self.outcome.step_seconds = self.phase_over()
                self._close()
        except (ValueError, KeyError, TypeError, AttributeError):
            self.fail("not_openenv", f"not an answer of an environment: {body[:200]!r}")

    def _close(self) -> None:
        if self.script.closing:
            self.write(self.script.closing)
        else:
            self.end()


class WsSession(Session):
    """One session on `/ws`."""

    _text = b""

    @staticmethod
    def script_for(authority: str, path: str, action: Json, headers: str) -> Script:
        """Make what its sessions send."""
        close_frame = unmasked_client_frame(close_payload(NORMAL_CLOSE), CLOSE)
        return Script(
            opening=upgrade_request(authority, f"{path}/ws", headers),
            reset=unmasked_client_frame(b'{"type":"reset","data":{}}'),
            step=unmasked_client_frame(orjson.dumps({"type": "step", "data": action})),
            closing=unmasked_client_frame(b'{"type":"close"}') + close_frame,
        )

    def data_received(self, data: bytes) -> None:
        """Read what the server sent."""
        if self.over.done():
            return
        data = self._unread + data if self._unread else data
        if self.is_admitted:
            self._read_frames(data, 0)
            return
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._unread = data
            if len(data) > MAX_HEAD_BYTES:
                self.fail("not_websocket", "the answer to the upgrade is incomplete")
        elif not data.startswith(b"HTTP/1.1 101"):
            line = data[: data.find(b"\r\n")].decode("latin-1")
            self.fail("refused", f"the upgrade was answered with {line}")
        else:
            self.outcome.connect_seconds = self.phase_over()
            self.was_admitted()
            self.write(self.script.reset)
            self._read_frames(data, end + 4)

    def _read_frames(self, data: bytes, start: int) -> None:
        while not self.over.done() and (found := take_frame(data, start)) is not None:
            opcode, is_last, payload, start = found
            if opcode in (TEXT, CONTINUATION):
                self._text += payload
                if is_last:
                    text, self._text = self._text, b""
                    self.answered(text)
            elif opcode == CLOSE:
                self._on_close(payload)
            elif opcode == PING:
                self.write(unmasked_client_frame(payload, PONG))
        self._unread = data[start:]

    def _on_close(self, payload: bytes) -> None:
        if self.outcome.step_seconds is not None:
            self.end()
            return
        code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else NO_CODE_CLOSE
        why = payload[2:].decode("utf-8", "replace")
        self.fail("closed", f"the server closed with {code} {why}".rstrip())


class HttpSession(Session):
    """A reset and a step."""

    @staticmethod
    def script_for(authority: str, path: str, action: Json, headers: str) -> Script:
        """Make what its sessions send; the handshake is TCP's, so that the reset comes first."""

        def post(route: str, body: Json) -> bytes:
            content = orjson.dumps(body)
            return (
                f"POST {path}/{route} HTTP/1.1\r\nHost: {authority}\r\n{headers}"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            ).encode() + content

        return Script(post("reset", {}), b"", post("step", {"action": action}), b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for a reset."""
        self.outcome.connect_seconds = self.phase_over()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Read what the server sent."""
        if self.over.done():
            return
        self.was_admitted()
        self._unread += data
        end = self._unread.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._unread, 0, end)
        if length is None:
            self.fail("not_http", "an answer without Content-Length")
        elif len(self._unread) >= end + 4 + int(length[1]):
            status, body = self._unread[9:12], self._unread[end + 4 :]
            self._unread = b""
            if status == b"200":
                self.answered(body)
            else:
                self.fail(f"http_{status.decode('latin-1')}", body.decode("utf-8", "replace"))


SESSIONS: dict[str, type[WsSession | HttpSession]] = {"ws": WsSession, "http": HttpSession}


def take_frame(data: bytes, start: int) -> tuple[int, bool, bytes, int] | None:
    """Read the server's frame that begins at `start`; None when it is not complete yet.

    Returns:
        Opcode, whether the frame ends its message, payload, and where the frame ends.
    """
    if (head := parse_head(data, start)) is None:
        return None
    first, _, payload_at, end = head
    if len(data) < end:
        return None
    return first & OPCODE, first >= FIN, data[payload_at:end], end
