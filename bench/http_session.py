# SPDX-License-Identifier: Apache-2.0
"""One measured session over plain HTTP: `POST /reset`, `POST /step`, on one kept connection.

OpenEnv's HTTP routes keep nothing between calls: this measures requests, not sessions. There is
nothing to hold between reset and step.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from .session import MeasuredSession, Owner

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


class HttpScript:
    """The bytes that every session of a batch sends to one server."""

    def __init__(
        self, authority: str, path: str, action: dict[str, Any], headers: str = ""
    ) -> None:
        self.reset = _post(authority, f"{path}/reset", {}, headers)
        self.step = _post(authority, f"{path}/step", {"action": action}, headers)


def _post(authority: str, path: str, body: dict[str, Any], headers: str) -> bytes:
    content = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class HttpSession(MeasuredSession):
    """A reset and a step."""

    def __init__(self, script: HttpScript, owner: Owner, started_at: float) -> None:
        super().__init__(owner, started_at)
        self._script = script

    def data_received(self, data: bytes) -> None:
        """Read what the server sent."""
        if self.is_over:
            return
        if not self.is_admitted:
            self._was_admitted()
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
            self._on_answer(status, body)

    def _open(self) -> None:
        self.outcome.connect_seconds = self._phase_over()
        self._write(self._script.reset)

    def _step(self) -> None:
        self._write(self._script.step)

    def _on_answer(self, status: bytes, body: bytes) -> None:
        if status != b"200":
            text = body.decode("utf-8", "replace")
            self.fail(f"http_{status.decode('latin-1')}", text)
        elif self.outcome.reset_seconds is None:
            self._was_reset()
        else:
            self._was_stepped(body)

    def _was_stepped(self, body: bytes) -> None:
        try:
            self.outcome.observation = orjson.loads(body)["observation"]
        except (ValueError, KeyError, TypeError):
            self.fail("not_openenv", f"not an answer of an environment: {body[:200]!r}")
            return
        self.outcome.step_seconds = self._phase_over()
        self._end()
