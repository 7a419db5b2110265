# SPDX-License-Identifier: Apache-2.0
"""Directs a task's output into its log by file descriptor, so that it survives any exit.

The log is there from the task's start, and is removed at its end if nothing is in it: most SHORT
tasks print nothing. A later attempt appends to what an earlier one has printed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def begin_log(path: str) -> None:
    """Point stdout and stderr at the end of the log; at nothing when it cannot be opened."""
    try:
        log = os.open(path, _FLAGS, 0o600)
    except OSError:  # a full disk must not fail a task that may be able to do without
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if log > 2:  # an operation may have closed 1 or 2, so that the log was opened as one of them
        os.close(log)
    # New streams each time: an operation may have closed those of its process.
    sys.stdout, sys.stderr = (
        open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def end_log(path: str) -> None:
    """Flush: what the task printed is in its log when this returns."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError):
        if not Path(path).stat().st_size:
            Path(path).unlink()
