# SPDX-License-Identifier: Apache-2.0
"""Explains how a shim's server exited, with the evidence; or why it could not be started.

The kernel's counters are read before the server starts and at every look, so that earlier kills are
not taken for the cause of an exit. `system/process/diagnose.py` interprets them; it is imported at
an exit, so that shims stay small. If our modules are gone (after an upgrade), the bare facts are
reported.

The exit of a shard is observed and explained by the server, which is its parent (`explain_child` in
`diagnose.py`).
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from signal import SIGKILL

from ...system.memory.cgroups import Cgroup
from ...system.process.oom_evidence import OomCounters, read_oom_counters
from ...system.process.proc import split_wait_status
from ...system.text.json_lines import Json

EXIT_CANNOT_START = 127  # as a shell exits if it cannot start a command
Ended = tuple[int, int | None]  # wait status, peak resident bytes
DYING_SECONDS = 10.0  # from the count of a kill until its victim is reaped, on a busy machine


class ExitEvidence:
    """Counters of one server's cgroup, read while it lives."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._cgroup: Cgroup | None = None
        self._since = 0.0  # monotonic
        self._counters = [OomCounters()]  # before the last kills, and at the last look
        self._moved_at = 0.0  # when they last changed; monotonic

    def begin(self, cgroup: Cgroup | None) -> None:
        """Count for a server that is about to start in `cgroup`."""
        self._cgroup = cgroup
        self._since = self._moved_at = time.monotonic()
        self._counters = [read_oom_counters(cgroup)]

    def look(self) -> None:
        """Read the counters.

        A kill is counted before its victim is dead; until then, the counters before it are kept.
        """
        counters, now = read_oom_counters(self._cgroup), time.monotonic()
        before, last = self._counters[0], self._counters[-1]
        if _kills(counters) != _kills(last):
            self._moved_at = now
        elif now - self._moved_at >= DYING_SECONDS:
            before = counters
        self._counters = [before, counters]

    def explain(
        self, pid: int, ended: Ended | None, *, stopped_by_us: bool, failed: str | None
    ) -> Json:
        """Return the server's `ExitReason` as JSON.

        `ended` is its wait status and its peak of resident bytes, or None if it was not reaped.
        `failed` is its own reason for giving up.
        """
        status, most_resident_bytes = ended or (None, None)
        peak = self._cgroup.peak_bytes() if self._cgroup is not None else None
        try:
            from dataclasses import replace

            from ...system.process.diagnose import diagnose_exit, gather_evidence

            evidence = gather_evidence(
                self._counters[0], self._cgroup, pid, status, since_monotonic=self._since
            )
            known = replace(
                evidence,
                stopped_by_us=stopped_by_us,
                limit_bytes=self._limit_bytes,
                peak_bytes=peak or most_resident_bytes,
                memory_error=(failed or "").startswith("MemoryError"),
                seconds=time.monotonic() - self._since,
            )
            return diagnose_exit(known).to_json()
        except Exception as exc:  # the replica must be served, even if its past is not explained
            print(f"shim: cannot explain an exit: {exc!r}", file=sys.stderr)  # noqa: T201
            return bare_exit(pid, status)

    def note_child(self, report: Json) -> None:
        """Exclude kills of processes below the server from the evidence of its own exit."""
        self.look()
        if killed := _victims(report):  # others may have been killed as well
            before, last = self._counters
            self._counters = [_after_kills(before, last, killed), last]


def _kills(counters: OomCounters) -> int | None:
    """Return the kills in the cgroup; without one, on the machine."""
    return counters.vmstat if counters.oom_kills is None else counters.oom_kills


def _victims(report: Json) -> int:
    """Return how many processes the kernel killed, by the report of their exits."""
    reason = report.get("reason", {})
    was_killed = reason.get("kind") == "oom_killed" and reason.get("signal_number") == SIGKILL
    if not was_killed or reason.get("detector") == "watchdog":
        return 0
    return int(report.get("programs") or 1)


def _after_kills(before: OomCounters, last: OomCounters, kills: int) -> OomCounters:
    """Return the earlier counters, advanced by a number of kills, up to the last ones."""
    pairs = zip(before, last, strict=True)
    return OomCounters(*(b if a is None or b is None else min(b, a + kills) for a, b in pairs))


def bare_exit(pid: int, status: int | None) -> Json:
    """Return an `ExitReason` that is made only from a wait status."""
    if status is None:
        return {"kind": "lost", "pid": pid}
    code, number = split_wait_status(status)
    if number is not None:
        return {"kind": "signaled", "pid": pid, "signal_number": number}
    return {"kind": "exited", "pid": pid, "exit_code": code}


def exit_without_start(why: str) -> Json:
    """Return the `ExitReason` of a server that never ran."""
    return {"kind": "exited", "pid": 0, "exit_code": EXIT_CANNOT_START, "evidence": why}


def why_no_server(exc: OSError) -> str:
    """Return why a server could not be started, naming the file, address or limit."""
    if exc.errno == errno.EAGAIN:
        with contextlib.suppress(Exception):  # if our modules or all descriptors are gone
            from ...system.memory.limits import no_room_text

            return no_room_text()
    where = f": {exc.filename}" if exc.filename else ""
    return f"{exc.strerror}{where}"
