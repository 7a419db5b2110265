# SPDX-License-Identifier: Apache-2.0
"""One measured session over WebSocket, as light as Python allows.

    connect ─▶ upgrade ─▶ reset ─▶ step ─▶ close message + close frame ─▶ the server's close frame

Written by hand: what the client says is the same bytes for every session, made once per batch
(`WsScript`), so that a session costs one connection, five writes and as many reads. The mask is
zero, which leaves a payload as it is; masks protect proxies, of which there are none here.
Compression is not offered.
"""

from __future__ import annotations

import base64
import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import orjson

from .session import MeasuredSession, Owner

CONTINUED, TEXT, CLOSE, PING, PONG = 0x0, 0x1, 0x8, 0x9, 0xA
MAX_HEAD_BYTES = 64 * 1024
_FIN = 0x80
_MASKED = 0x80
_NO_MASK = b"\0\0\0\0"
_NORMAL_CLOSE = struct.pack("!H", 1000)
_NO_CODE = 1005  # a close frame that gives no reason


@dataclass(frozen=True, slots=True)
class WsScript:
    """The bytes that every session of a batch sends."""

    opening: bytes
    reset: bytes
    step: bytes
    closing: bytes

    @classmethod
    def of(cls, authority: str, path: str, action: dict[str, Any]) -> WsScript:
        """For one server and one action."""
        return cls(
            opening=_upgrade(authority, f"{path}/ws"),
            reset=frame(TEXT, b'{"type":"reset","data":{}}'),
            step=frame(TEXT, orjson.dumps({"type": "step", "data": action})),
            closing=frame(TEXT, b'{"type":"close"}') + frame(CLOSE, _NORMAL_CLOSE),
        )


def frame(opcode: int, payload: bytes) -> bytes:
    """One frame from client to server."""
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", _FIN | opcode, _MASKED | size)
    elif size < 2**16:
        head = struct.pack("!BBH", _FIN | opcode, _MASKED | 126, size)
    else:
        head = struct.pack("!BBQ", _FIN | opcode, _MASKED | 127, size)
    return head + _NO_MASK + payload


def take_frame(data: bytes, start: int) -> tuple[int, bool, bytes, int] | None:
    """The frame of a server that begins at `start`: opcode, whether it ends its message, payload,
    and where it ends; None when it is not whole yet.
    """
    if len(data) < start + 2:
        return None
    size, begin = data[start + 1] & 0x7F, start + 2
    if size >= 126:
        begin += 2 if size == 126 else 8
        if len(data) < begin:
            return None
        size = int.from_bytes(data[start + 2 : begin], "big")
    end = begin + size
    if len(data) < end:
        return None
    return data[start] & 0x0F, data[start] >= _FIN, data[begin:end], end


def _upgrade(authority: str, path: str) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


class WsSession(MeasuredSession):
    """One session on `/ws`."""

    def __init__(
        self, script: WsScript, owner: Owner, started_at: float, *, hold: bool = False
    ) -> None:
        super().__init__(owner, started_at, hold=hold)
        self._script = script
        self._text = b""

    def data_received(self, data: bytes) -> None:
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
                self.fail("not_websocket", "the answer to the upgrade has no end")
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
            if opcode in (TEXT, CONTINUED):
                self._text += payload
                if is_last:
                    self._on_text()
            elif opcode == CLOSE:
                self._on_close(payload)
            elif opcode == PING:
                self._write(frame(PONG, payload))
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
                self._was_stepped(data["observation"])
        except (ValueError, KeyError, AttributeError):
            self.fail("not_openenv", f"this is no answer of an environment: {text[:200]!r}")

    def _was_stepped(self, observation: dict[str, Any]) -> None:
        self.outcome.step_seconds = self._phase_over()
        self.outcome.observation = observation
        self._write(self._script.closing)

    def _on_close(self, payload: bytes) -> None:
        if self.outcome.step_seconds is not None:
            self._end()
            return
        code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else _NO_CODE
        why = payload[2:].decode("utf-8", "replace")
        self.fail("closed", f"the server closed with {code} {why}".rstrip())
