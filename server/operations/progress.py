# SPDX-License-Identifier: Apache-2.0
"""Progress of a request: its phase, and an estimate of the time that the phase still takes.

    {"phase", "message", "done"?, "total"?, "eta_seconds"?, "at_most_seconds"?}

`eta_seconds` is the rest of a count at the speed so far, `at_most_seconds` a limit.
"""

from __future__ import annotations

import re
import time

from ...environments.engines.started_replicas import StartedReplica
from ...system.text.json_lines import Json
from ...system.text.units import plural
from .base import OperationContext

MAX_LINE = 100  # characters of a replica's log in a message

# uv reports the end of a phase; `_FOLLOWING` has the next one.
_UV = re.compile(r"\s*uv: (Resolved|Prepared) (\d+) packages?\b")
_FOLLOWING = {"Resolved": "downloading", "Prepared": "installing"}


def eta_seconds(done: float, total: float, seconds: float) -> float | None:
    """Return how long the rest takes at the speed until now; None when there is none yet."""
    return seconds / done * (total - done) if 0 < done <= total else None


class ReplicasAwaited:
    """Reports which replicas have become ready, and once each reason why others are not."""

    def __init__(self, context: OperationContext, total: int) -> None:
        self._context = context
        self._total = total
        self._started_at = time.monotonic()
        self._ready = 0
        self._reason = self._line = ""

    def on_ready(self, replica: StartedReplica) -> None:
        """Count a replica that is ready."""
        self._ready += 1
        seconds = time.monotonic() - self._started_at
        pid = replica.pid
        self._context.say(f"replica {replica.ordinal} (pid {pid}) is ready ({seconds:.1f} s)")
        self.report(f"{self._ready} of {plural(self._total, 'replica')} ready")

    def on_lasting(self, reason: str, seconds: float) -> None:
        """Report why the others are not ready after a while, and how long they still have."""
        if reason != self._reason:
            self._reason = reason
            left = f"{seconds // 60:.0f} min" if seconds >= 120 else f"{max(0.0, seconds):.0f} s"
            ends = f"openenv cancel {self._context.request_id[:8]} ends it"
            self._context.say(f"{reason}; gives up in {left}, {ends}")
        self.report(reason, at_most_seconds=round(seconds, 1))

    def on_line(self, line: str) -> None:
        """Report the last line of a replica's log while nothing else says why it is not ready."""
        if line not in ("", self._line):
            self._line = line
            ready = f"{self._ready} of {plural(self._total, 'replica')} ready"
            self.report(f"{ready}: {line[:MAX_LINE]}")

    def report(self, message: str, **more: float) -> None:
        """Report how many are ready."""
        counts = {"done": self._ready, "total": self._total}
        self._context.progress({"phase": "waiting", "message": message, **counts, **more})


class SessionsLeft:
    """Reports how many sessions are left on replicas that are being ended within `seconds`."""

    def __init__(self, context: OperationContext, sessions: dict[str, int], seconds: float) -> None:
        self._context = context
        self._of_each = dict(sessions)
        self._left = self._total = sum(sessions.values())
        self._deadline = time.monotonic() + seconds
        self._report()

    def note(self, replica_id: str, sessions: int) -> None:
        """Take a replica's sessions as of now."""
        fewer = self._of_each.get(replica_id, 0) - sessions
        if fewer > 0:  # new sessions are not waited for
            self._of_each[replica_id] = sessions
            self._left -= fewer
            self._report()

    def _report(self) -> None:
        message = f"draining: {self._left} of {plural(self._total, 'session')} left"
        if not self._total:
            message = f"ending {plural(len(self._of_each), 'replica')}"
        at_most = round(max(0.0, self._deadline - time.monotonic()), 1)
        progress: Json = {"phase": "draining", "message": message, "at_most_seconds": at_most}
        if self._total:
            progress |= {"done": self._total - self._left, "total": self._total}
        self._context.progress(progress)


class Phases:
    """The phases of one request."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def enter_aloud(self, phase: str, message: str) -> None:
        """Report that a phase begins, also in the request's log."""
        self._context.say(message)
        self.enter(phase, message)

    def enter(self, phase: str, message: str) -> None:
        """Report that a phase begins, and with it the end of the one before."""
        self._context.progress({"phase": phase, "message": message})

    def relay(self, line: str) -> None:
        """Write a line to the log; if uv wrote it, enter the phase that it announces."""
        self._context.say(line)
        if found := _UV.match(line):
            phase = _FOLLOWING[found[1]]
            self.enter(phase, f"{phase} {plural(int(found[2]), 'package')}")
