# SPDX-License-Identifier: Apache-2.0
"""`Notifier`: writes the supervisor's reports into the notify pipe (see `protocol.py`)."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from ...system.json_lines import encode_line
from ..protocol import Serving

log = logging.getLogger("openenvd.env_host")


class Notifier:
    """Writes one JSON object a line; does nothing when there is no pipe."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.reported = 0
        self._notes: list[str] = []
        self._differences: list[str] = []
        self._sessions_fail: str | None = None

    def note(self, text: str) -> None:
        """Have the launch say what a user should know of this environment, and log it."""
        log.warning("%s", text)
        self._notes.append(text)

    def differ(self, sentences: list[str], *, is_noted: bool) -> None:
        """Take what several processes make different; the launch says it only if it is noted."""
        self._differences = sentences
        for text in sentences if is_noted else ():
            self.note(text)

    def ready(self, *, max_sessions: int | None, serving: Serving, **how: Any) -> None:
        """Report that sessions are accepted; `how` is for people."""
        if self._notes:
            how["notes"] = self._notes
        if self._differences:
            how["differences"] = self._differences
        self._write({"ready": True, "max_sessions": max_sessions, "serving": serving, **how})

    def failed(self, message: str, log_tail: list[str]) -> None:
        """Report that the supervisor is about to exit by itself."""
        self._write({"failed": message, "log_tail": log_tail})

    def draining(self) -> None:
        """Report that no session begins here any more."""
        self._write({"draining": True})

    def sleeps(self) -> None:
        """Report that the supervisor is about to exit since nobody uses it."""
        self._write({"sleeps": True})

    def sessions_fail(self, cause: str | None) -> None:
        """Report that an environment could not be created, or that one could again."""
        if cause != self._sessions_fail:
            self._sessions_fail = cause
            self._write({"sessions_fail": cause})

    def shard_exit(self, **facts: Any) -> None:
        """Report that a process that served sessions has exited; the supervisor goes on."""
        self._write({"shard_exit": facts})

    def capacity(self, summary: dict[str, Any]) -> None:
        """Report how full the shards are (`capacity.summary_of`); dropped if the pipe is full."""
        if self.fd is None:
            return
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            os.write(self.fd, encode_line({"capacity": summary}))  # whole or not at all

    def sessions(self, count: int) -> None:
        """Report the number of sessions, unless the pipe is full."""
        if self.fd is not None and count != self.reported:
            os.set_blocking(self.fd, False)
            line = encode_line({"sessions": count})
            try:
                os.write(self.fd, line)  # whole or not at all
            except BlockingIOError:
                return
            except OSError:  # the shim is gone; the sessions need not be
                self.fd = None
        self.reported = count

    def silence(self) -> None:
        """Write nothing from now on: this process is not the supervisor any more."""
        self.fd = None

    def _write(self, line: dict[str, Any]) -> None:
        if self.fd is None:
            return
        os.set_blocking(self.fd, True)
        data = encode_line(line)
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            self.fd = None
