# SPDX-License-Identifier: Apache-2.0
"""`SignalPipe`: receives signals through a pipe that a process can select on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)


class SignalPipe:
    """Receives signals as bytes of a pipe, in the process that makes it.

    A forked child gives them back with `forking.reset_signals`.
    """

    def __init__(
        self, numbers: Iterable[signal.Signals], *, ignored: Iterable[signal.Signals] = ()
    ) -> None:
        """Take `numbers` over, and ignore `ignored`. Call it in the main thread."""
        self.fds = self._reading, writing = os.pipe()
        for fd in self.fds:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # the byte in the pipe is the handler
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reading

    def take(self) -> set[int]:
        """Return the numbers of the signals that have arrived since the last call."""
        try:
            return set(os.read(self._reading, 4096))
        except BlockingIOError:
            return set()
