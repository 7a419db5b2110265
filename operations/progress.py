# SPDX-License-Identifier: Apache-2.0
"""What a request reports of its progress: the phase it is in, and how long that will take yet.

    {"phase", "message", "done"?, "total"?, "eta_seconds"?, "expected_seconds"?, "at_most_seconds"?}

An estimate stands on something, or there is none: `eta_seconds` on what has been done of a count,
at the speed until now; `at_most_seconds` on a limit; `expected_seconds` on how long the phase took
for the same source before, the median of the last times. These are kept in `home/durations.json`;
a request that fails adds nothing to them, and of two that write at once one is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .base import OperationContext, say

Json = dict[str, Any]

FILE = "durations.json"
MOST_SOURCES = 200
MOST_TIMES = 5
LEAST_SECONDS = 0.5  # of a phase whose duration is worth telling

# uv tells when a phase has ended: what follows it, then.
_UV = re.compile(r"\s*uv: (Resolved|Prepared) (\d+) packages?\b")
_FOLLOWING = {"Resolved": "downloading", "Prepared": "installing"}


def eta_seconds(done: float, total: float, seconds: float) -> float | None:
    """Return how long the rest takes at the speed until now; None when there is none yet."""
    return seconds / done * (total - done) if 0 < done <= total else None


class LastingWait:
    """The report of replicas that have not been ready for a while; one for each wait.

    What could be done is said once for each reason; the time left is reported again and again.
    """

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self._text = ""

    def note(self, text: str, seconds: float, *, done: int, total: int, fewer: str = "") -> None:
        """Take why replicas wait, and the seconds left; `fewer` says how there would be no wait."""
        if text != self._text:
            self._text = text
            left = f"{seconds // 60:.0f} min" if seconds >= 120 else f"{max(0.0, seconds):.0f} s"
            ends = f"openenv cancel {self._context.request_id[:8]} ends it"
            say(f"{text}; gives up in {left}, {ends}{fewer and f'; {fewer}'}")
        left_now = {"at_most_seconds": round(seconds, 1)}
        progress = {"phase": "waiting", "message": text, "done": done, "total": total, **left_now}
        self._context.progress(progress)


class SessionsLeft:
    """How many sessions are left of replicas that are being ended.

    Args:
        context: Where that is reported: at once, and when it has changed.
        sessions: Of each replica, by its id.
        seconds: For which they may go on.
        clock: Seconds.
    """

    def __init__(
        self,
        context: OperationContext,
        sessions: dict[str, int],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._left = dict(sessions)
        self._total = sum(sessions.values())
        self._clock = clock
        self._deadline = clock() + seconds
        self._report()

    def note(self, replica_id: str, sessions: int) -> None:
        """Take a replica's sessions as of now."""
        before = self._left.get(replica_id, 0)
        if sessions < before:  # more are not those that are waited for
            self._left[replica_id] = sessions
            self._report()

    def _report(self) -> None:
        left = sum(self._left.values())
        message = f"draining: {left} of {self._total} sessions left"
        if not self._total:
            message = f"ending {len(self._left)} replica{'' if len(self._left) == 1 else 's'}"
        at_most = round(max(0.0, self._deadline - self._clock()), 1)
        progress: Json = {"phase": "draining", "message": message, "at_most_seconds": at_most}
        if self._total:
            progress |= {"done": self._total - left, "total": self._total}
        self._context.progress(progress)


class Phases:
    """The phases of one request.

    Args:
        context: Where they are reported.
        source: What they are about: the same one takes as long again.
        clock: Seconds.
    """

    def __init__(
        self,
        context: OperationContext,
        source: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._file = context.home / FILE
        self._key = hashlib.sha256(source.encode()).hexdigest()[:16]
        self._clock = clock
        self._before = _read(self._file).get(self._key, {})
        self._taken: dict[str, float] = {}
        self._phase: str | None = None
        self._since = 0.0

    def enter(self, phase: str, message: str) -> None:
        """Report that a phase begins, and with it the end of the one before."""
        self._end()
        self._phase, self._since = phase, self._clock()
        progress: Json = {"phase": phase, "message": message}
        if times := self._before.get(phase):
            progress["expected_seconds"] = round(statistics.median(times), 1)
        self._context.progress(progress)

    def relay(self, line: str) -> None:
        """Write a line to the log; of uv's, enter the phase that it announces."""
        say(line)
        if found := _UV.match(line):
            phase = _FOLLOWING[found[1]]
            self.enter(phase, f"{phase} {found[2]} package{'' if found[2] == '1' else 's'}")

    def finish(self) -> None:
        """Remember how long the phases took: the request has succeeded."""
        self._end()
        known = _read(self._file)
        mine = known.pop(self._key, {})
        for phase, seconds in self._taken.items():
            if seconds >= LEAST_SECONDS:
                mine[phase] = [*mine.get(phase, ()), round(seconds, 2)][-MOST_TIMES:]
        if mine:
            known[self._key] = mine  # last: the oldest go first
            _write(self._file, dict(list(known.items())[-MOST_SOURCES:]))

    def _end(self) -> None:
        if self._phase is not None:
            seconds = self._clock() - self._since
            self._taken[self._phase] = self._taken.get(self._phase, 0.0) + seconds
        self._phase = None


def _read(file: Path) -> dict[str, dict[str, list[float]]]:
    try:
        found = json.loads(file.read_bytes())
        return {
            str(key): {str(phase): [float(each) for each in times] for phase, times in each.items()}
            for key, each in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, known: Json) -> None:
    """Replace the file; without room on the disk, nothing is remembered."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        beside.write_text(json.dumps(known))
        beside.chmod(0o600)
        beside.replace(file)
        return
    with contextlib.suppress(OSError):
        beside.unlink()
