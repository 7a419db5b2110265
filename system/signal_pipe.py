# SPDX-License-Identifier: Apache-2.0
"""Signals as something to select on, for the small processes that outlive us."""

from __future__ import annotations

import os
import signal


def watch_signals() -> int:
    """The end of a pipe on which SIGTERM and SIGCHLD arrive as bytes; a terminal's SIGINT and
    SIGHUP are ignored."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the byte in the pipe is the handler
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return reading
