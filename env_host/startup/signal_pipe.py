# SPDX-License-Identifier: Apache-2.0
"""`SignalPipe`: signals as something to wait for with `select`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


class SignalPipe:
    """Takes these signals over, in the process that makes it; a fork gives them back."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.fds = self._reading, writing = os.pipe()
        for fd in self.fds:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # the byte in the pipe is the handler

    def fileno(self) -> int:
        """What becomes readable."""
        return self._reading

    def take(self) -> set[int]:
        """Those that have come."""
        return set(os.read(self._reading, 4096))
