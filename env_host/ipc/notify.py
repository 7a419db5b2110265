# SPDX-License-Identifier: Apache-2.0
"""`Notifier`: writes the supervisor's reports into the notify pipe (see `protocol.py`)."""

from __future__ import annotations

import logging
import os
from typing import Any

from ...schema.protocol import Serving
from ...system.text.json_lines import encode_line

log = logging.getLogger("openenvd.env_host")


class Notifier:
    """Writes one JSON object a line; does nothing when there is no pipe."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.reported = 0
        self._notes: list[str] = []
        self._differences: list[str] = []
        self.failure: str | None = None  # to create an environment, as reported last

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
        self.report(ready=True, max_sessions=max_sessions, serving=serving, **how)

    def report(self, **line: Any) -> None:
        """Write one of the reports of `protocol.py`."""
        if self.fd is None:
            return
        os.set_blocking(self.fd, True)
        data = encode_line(line)
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            self.fd = None

    def sessions_fail(self, cause: str | None) -> None:
        """Report that an environment could not be created, or that one could again."""
        if cause != self.failure:
            self.failure = cause
            self.report(sessions_fail=cause)

    def capacity(self, summary: dict[str, Any]) -> None:
        """Report how full the shards are (`capacity.summary_of`); dropped if the pipe is full."""
        self._write_if_room({"capacity": summary})

    def sessions(self, count: int) -> None:
        """Report the number of sessions, unless the pipe is full."""
        if count == self.reported or self._write_if_room({"sessions": count}):
            self.reported = count

    def _write_if_room(self, line: dict[str, Any]) -> bool:
        """Write a line, whole or not at all; False: the pipe is full."""
        try:
            if self.fd is not None:
                os.set_blocking(self.fd, False)
                os.write(self.fd, encode_line(line))
        except BlockingIOError:
            return False
        except OSError:  # the shim is gone; the sessions need not be
            self.fd = None
        return True

    def silence(self) -> None:
        """Write nothing from now on: this process is not the supervisor any more."""
        self.fd = None
