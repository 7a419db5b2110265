# SPDX-License-Identifier: Apache-2.0
"""One measured session over WebSocket, as light as Python allows.

    connect ─▶ upgrade ─▶ reset ─▶ step ─▶ close message + close frame ─▶ the server's close frame

Written by hand: the client sends the same bytes in every session, made once per batch
(`WsScript`), so that a session costs one connection, five writes and as many reads. The mask is
zero, which leaves a payload as it is; masks protect proxies, of which there are none here.
Compression is not offered.
"""

from __future__ import annotations

import time
from typing import Any

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
from .session import MeasuredSession, Owner

MAX_HEAD_BYTES = 64 * 1024


class WsScript:
    """The bytes that every session of a batch sends to one server."""

    def __init__(
        self, authority: str, path: str, action: dict[str, Any], headers: str = ""
    ) -> None:
        self.opening = upgrade_request(authority, f"{path}/ws", headers)
        self.reset = unmasked_client_frame(b'{"type":"reset","data":{}}')
        self.step = unmasked_client_frame(orjson.dumps({"type": "step", "data": action}))
        self.closing = unmasked_client_frame(b'{"type":"close"}')
        self.closing += unmasked_client_frame(close_payload(NORMAL_CLOSE), CLOSE)


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


class WsSession(MeasuredSession):
    """One session on `/ws`."""

    def __init__(
        self, script: WsScript, owner: Owner, started_at: float, *, hold: bool = False
    ) -> None:
        super().__init__(owner, started_at, hold=hold)
        self._script = script
        self._text = b""

    def data_received(self, data: bytes) -> None:
        """Read what the server sent."""
        if self.is_over:
            return
        data = self._unread + data if self._unread else data
        if self.is_admitted:
            self._read_frames(data, 0)
        else:
            self._read_head(data)

    def _open(self) -> None:
        self._write(self._script.opening)

    def _step(self) -> None:
        self._began = time.monotonic()
        self._write(self._script.step)

    def _read_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._unread = data
            if len(data) > MAX_HEAD_BYTES:
                self.fail("not_websocket", "the answer to the upgrade is incomplete")
        elif not data.startswith(b"HTTP/1.1 101"):
            line = data[: data.find(b"\r\n")].decode("latin-1")
            self.fail("refused", f"the upgrade was answered with {line}")
        else:
            self.outcome.connect_seconds = self._phase_over()
            self._was_admitted()
            self._write(self._script.reset)
            self._read_frames(data, end + 4)

    def _read_frames(self, data: bytes, start: int) -> None:
        while not self.is_over and (found := take_frame(data, start)) is not None:
            opcode, is_last, payload, start = found
            if opcode in (TEXT, CONTINUATION):
                self._text += payload
                if is_last:
                    self._on_text()
            elif opcode == CLOSE:
                self._on_close(payload)
            elif opcode == PING:
                self._write(unmasked_client_frame(payload, PONG))
        self._unread = data[start:]

    def _on_text(self) -> None:
        text, self._text = self._text, b""
        try:
            message = orjson.loads(text)
            data = message.get("data") or {}
            if message["type"] == "error":
                self.fail(str(data.get("code", "error")), str(data.get("message", "")))
            elif self.outcome.reset_seconds is None:
                self._was_reset()
            elif self.outcome.step_seconds is None:
                observation = data["observation"]
                self.outcome.step_seconds = self._phase_over()
                self.outcome.observation = observation
                self._write(self._script.closing)
        except (ValueError, KeyError, AttributeError):
            self.fail("not_openenv", f"not an answer of an environment: {text[:200]!r}")

    def _on_close(self, payload: bytes) -> None:
        if self.outcome.step_seconds is not None:
            self._end()
            return
        code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else NO_CODE_CLOSE
        why = payload[2:].decode("utf-8", "replace")
        self.fail("closed", f"the server closed with {code} {why}".rstrip())
