# SPDX-License-Identifier: Apache-2.0
"""Words for a wait status: how a process exited, or which signal ended it."""

from __future__ import annotations

import os
import signal

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}


def split_wait_status(wait_status: int) -> tuple[int | None, int | None]:
    """Return a process's exit code and the signal that ended it; one of them is None."""
    code = os.waitstatus_to_exitcode(wait_status)
    return (code, None) if code >= 0 else (None, -code)


def signal_name(number: int) -> str:
    """Return `SIGKILL` rather than 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def exit_sentence(wait_status: int) -> str:
    """Return a clause for people, to stand after a subject: `was killed by SIGKILL`."""
    code, number = split_wait_status(wait_status)
    if number is None:
        return f"exited with code {code}"
    return f"{'crashed with' if number in _CRASHES else 'was killed by'} {signal_name(number)}"
