# SPDX-License-Identifier: Apache-2.0
"""`Notifier`: what the host tells its shim through the notify pipe (see `protocol.py`)."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from ..protocol import Serving


class Notifier:
    """Writes one JSON object a line; silent when nobody gave us a pipe."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.told = 0

    def ready(self, *, max_sessions: int | None, serving: Serving, **how: Any) -> None:
        """Sessions are accepted from now on; `how` is for people."""
        self._write({"ready": True, "max_sessions": max_sessions, "serving": serving, **how})

    def failed(self, message: str, log_tail: list[str]) -> None:
        """The host is about to exit on its own."""
        self._write({"failed": message, "log_tail": log_tail})

    def shard_exit(self, **facts: Any) -> None:
        """A process that served sessions has ended, unasked; the host goes on."""
        self._write({"shard_exit": facts})

    def capacity(self, summary: dict[str, Any]) -> None:
        """How full it is, and how its shards do (`capacity.summary_of`); what it said last, if
        the shim is too slow to hear it now."""
        if self.fd is None:
            return
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            os.write(self.fd, _encode({"capacity": summary}))  # whole or not at all

    def sessions(self, count: int) -> bool:
        """The number of sessions; False when the shim is too slow to hear it now."""
        if self.fd is None or count == self.told:
            self.told = count
            return True
        os.set_blocking(self.fd, False)
        try:
            os.write(self.fd, _encode({"sessions": count}))  # whole or not at all: it is short
        except BlockingIOError:
            return False
        except OSError:  # the shim is gone; the sessions need not be
            self.fd = None
        self.told = count
        return True

    def silence(self) -> None:
        """This process is not the host any more."""
        self.fd = None

    def _write(self, line: dict[str, Any]) -> None:
        if self.fd is None:
            return
        os.set_blocking(self.fd, True)
        data = _encode(line)
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            self.fd = None


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
