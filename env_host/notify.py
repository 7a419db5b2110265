# SPDX-License-Identifier: Apache-2.0
"""`Notifier`: what the host tells its keeper through the notify pipe (see `protocol.py`)."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from .protocol import Serving

_RETRY_SECONDS = 0.5  # when the keeper is slow to read


class Notifier:
    """Writes one JSON object a line; silent when nobody gave us a pipe."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._told = 0
        self._count = 0
        self._scheduled = False

    def ready(self, *, max_sessions: int | None, serving: Serving) -> None:
        """Sessions are accepted from now on."""
        self._write({"ready": True, "max_sessions": max_sessions, "serving": serving})

    def failed(self, message: str, log_tail: list[str]) -> None:
        """The host is about to exit on its own."""
        self._write({"failed": message, "log_tail": log_tail})

    def sessions(self, count: int) -> None:
        """The number of sessions has changed; told once per turn of the loop, the latest only."""
        self._count = count
        if self._fd is not None and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._scheduled = False
        if self._count == self._told:
            return
        count = self._count
        if self._try_write({"sessions": count}):
            self._told = count
        else:
            self._scheduled = True
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._tell)

    def _try_write(self, line: dict[str, Any]) -> bool:
        """Write without waiting for the keeper: the event loop must not stand still for it."""
        assert self._fd is not None
        os.set_blocking(self._fd, False)
        try:
            os.write(self._fd, _encode(line))  # short enough to be written whole or not at all
        except BlockingIOError:
            return False
        except OSError:  # the keeper is gone; the sessions need not be
            self._fd = None
        return True

    def _write(self, line: dict[str, Any]) -> None:
        if self._fd is None:
            return
        os.set_blocking(self._fd, True)
        data = _encode(line)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._fd = None


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
