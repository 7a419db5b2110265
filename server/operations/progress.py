# SPDX-License-Identifier: Apache-2.0
"""Progress of a request: its phase, and an estimate of the time that the phase still takes.

    {"phase", "message", "done"?, "total"?, "eta_seconds"?, "expected_seconds"?, "at_most_seconds"?}

Each estimate has a basis: `eta_seconds` is the rest of a count at the speed so far;
`at_most_seconds` is a limit; `expected_seconds` is the median of the times that the phase took for
the same source before. These times are kept in `home/durations.json`. A request that fails adds
none; if two requests write at once, those of one are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import statistics
import time
from pathlib import Path

from pydantic import TypeAdapter

from ...environments.engines.started_replicas import StartedReplica
from ...environments.shim.files import write_json
from ...schema.spec import EnvironmentSpec
from ...system.text.json_lines import Json
from ...system.text.units import plural
from .base import OperationContext

FILE = "durations.json"
MAX_SOURCES = 200
MAX_TIMES = 5
MAX_LINE = 100  # characters of a replica's log in a message
MIN_SECONDS = 0.5  # the times of shorter phases are not kept

# uv reports the end of a phase; `_FOLLOWING` has the next one.
_UV = re.compile(r"\s*uv: (Resolved|Prepared) (\d+) packages?\b")
_FOLLOWING = {"Resolved": "downloading", "Prepared": "installing"}


_DURATIONS = TypeAdapter(dict[str, dict[str, list[float]]])


def eta_seconds(done: float, total: float, seconds: float) -> float | None:
    """Return how long the rest takes at the speed until now; None when there is none yet."""
    return seconds / done * (total - done) if 0 < done <= total else None


class ReplicasAwaited:
    """Reports the replicas that are being started: each that is ready, and why others are not.

    Each reason is logged once, with the command that ends the wait; the time left is repeated.
    """

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
    """Reports how many sessions are left on replicas that are being ended, when that changes.

    `sessions` has those of each replica by its id; they may go on for some `seconds`.
    """

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
    """The phases of one request for a `source`; their times are expected for the next one."""

    def __init__(self, context: OperationContext, source: str) -> None:
        self._context = context
        self._file = context.home / FILE
        self._key = hashlib.sha256(source.encode()).hexdigest()[:16]
        self._before = _read(self._file).get(self._key, {})
        self._taken: dict[str, float] = {}
        self._phase: str | None = None
        self._since = 0.0

    @classmethod
    def of_launch(cls, context: OperationContext, spec: EnvironmentSpec) -> Phases:
        """Return the phases of a launch, in a worker or in the daemon."""
        return cls(context, f"{spec.provider} {spec.replicas} {spec.source}")

    def enter_aloud(self, phase: str, message: str) -> None:
        """Report that a phase begins, also in the request's log."""
        self._context.say(message)
        self.enter(phase, message)

    def enter(self, phase: str, message: str) -> None:
        """Report that a phase begins, and with it the end of the one before."""
        self._end()
        self._phase, self._since = phase, time.monotonic()
        progress: Json = {"phase": phase, "message": message}
        if times := self._before.get(phase):
            progress["expected_seconds"] = round(statistics.median(times), 1)
        self._context.progress(progress)

    def relay(self, line: str) -> None:
        """Write a line to the log; if uv wrote it, enter the phase that it announces."""
        self._context.say(line)
        if found := _UV.match(line):
            phase = _FOLLOWING[found[1]]
            self.enter(phase, f"{phase} {plural(int(found[2]), 'package')}")

    def finish(self) -> None:
        """Remember how long the phases took: the request has succeeded."""
        self._end()
        known = _read(self._file)
        mine = known.pop(self._key, {})
        for phase, seconds in self._taken.items():
            if seconds >= MIN_SECONDS:
                mine[phase] = [*mine.get(phase, ()), round(seconds, 2)][-MAX_TIMES:]
        if mine:
            known[self._key] = mine  # last: the oldest go first
            with contextlib.suppress(OSError):  # without room on the disk, nothing is remembered
                write_json(str(self._file), dict(list(known.items())[-MAX_SOURCES:]))

    def _end(self) -> None:
        if self._phase is not None:
            seconds = time.monotonic() - self._since
            self._taken[self._phase] = self._taken.get(self._phase, 0.0) + seconds
        self._phase = None


def _read(file: Path) -> dict[str, dict[str, list[float]]]:
    try:
        return _DURATIONS.validate_json(file.read_bytes())
    except (OSError, ValueError):  # pydantic raises a `ValueError`
        return {}
