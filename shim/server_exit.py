# SPDX-License-Identifier: Apache-2.0
"""How a shim's server exited, and with what evidence; or why it could not be started.

The kernel's counters are read before the server starts and at every look, so that what had
happened before an exit is not held to be its cause. What they mean is decided in
`processes/exits/diagnose.py`, which is imported when there is an exit: a shim imports this module,
and is light. When our modules are gone (upgraded meanwhile) the bare facts are reported.

The exit of a shard is the server's to see, which is its parent and goes on without it; the
evidence (cgroup counters, the kernel's log) is the shim's.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from signal import SIGKILL
from typing import Any

from ..processes.exits.oom_evidence import OomCounters, read_oom_counters
from ..system.cgroups import Cgroup
from ..system.json_lines import Json
from ..system.proc import split_wait_status

EXIT_CANNOT_START = 127  # as a shell says it
DYING_SECONDS = 10.0  # from the count of a kill until its victim is reaped, on a busy machine


class ExitEvidence:
    """Counters of one server's cgroup, read while it lives."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._cgroup: Cgroup | None = None
        self._since = 0.0  # monotonic
        self._counters = [OomCounters()]  # before the last kills, and at the last look
        self._moved_at = 0.0  # monotonic

    @property
    def oom_kills(self) -> int | None:
        """Kills for memory in the server's cgroup, at the last look; None without a cgroup."""
        return self._counters[-1].oom_kills

    def begin(self, cgroup: Cgroup | None) -> None:
        """Count for a server that is about to start in `cgroup`."""
        self._cgroup = cgroup
        self._since = self._moved_at = time.monotonic()
        self._counters = [read_oom_counters(cgroup)]

    def look(self) -> bool:
        """Count while the server lives; whether a process was killed for memory since.

        A kill is counted before its victim is dead: the counters from before it are kept meanwhile.
        """
        counters, now = read_oom_counters(self._cgroup), time.monotonic()
        before, last = self._counters[0], self._counters[-1]
        if _kills(counters) != _kills(last):
            self._moved_at = now
        elif now - self._moved_at >= DYING_SECONDS:
            before = counters
        self._counters = [before, counters]
        return counters.oom_kills != last.oom_kills

    def explain(
        self, pid: int, ended: tuple[int, int] | None, *, stopped_by_us: bool, failed: str | None
    ) -> Json:
        """Return the server's `ExitReason` as JSON.

        `ended` is its wait status and most resident bytes; None when it was not reaped. `failed` is
        why it gave up, in its own words.
        """
        status, most_resident_bytes = ended or (None, None)
        peak = self._cgroup.peak_bytes() if self._cgroup is not None else None
        try:
            return self._diagnose(
                pid,
                status,
                stopped_by_us=stopped_by_us,
                peak_bytes=peak or most_resident_bytes,
                memory_error=(failed or "").startswith("MemoryError"),
                seconds=time.monotonic() - self._since,
            )
        except Exception as exc:  # serving the replica matters more than explaining its past
            print(f"shim: cannot explain an exit: {exc!r}", file=sys.stderr)  # noqa: T201
            return bare_exit(pid, status)

    def explain_shard(self, facts: Json) -> Json:
        """Return what the server reported of a shard's exit, with `reason` and `at`."""
        report = facts
        try:
            if facts.get("out_of_memory"):  # over the cap of its own, which the server put on it
                reason = _over_own_cap(facts)
            else:
                reason = self._diagnose(
                    facts["pid"],
                    facts["wait_status"],
                    peak_bytes=facts.get("peak_bytes"),
                    seconds=facts.get("seconds"),
                )
            report = {**facts, "at": time.time(), "reason": reason}
        except Exception as exc:
            print(f"shim: cannot explain a shard's exit: {exc!r}", file=sys.stderr)  # noqa: T201
        self.look()
        if _is_victim(report.get("reason", {})):  # others may have been killed as well
            before, last = self._counters
            self._counters = [_after_one_kill(before, last), last]
        return report

    def _diagnose(self, pid: int, wait_status: int | None, **known: Any) -> Json:
        from dataclasses import replace

        from ..processes.exits.diagnose import diagnose_exit, gather_evidence

        evidence = gather_evidence(
            self._counters[0], self._cgroup, pid, wait_status, since_monotonic=self._since
        )
        return diagnose_exit(replace(evidence, limit_bytes=self._limit_bytes, **known)).to_json()


def _kills(counters: OomCounters) -> int | None:
    """Return those of the cgroup; without one, of the machine."""
    return counters.vmstat if counters.oom_kills is None else counters.oom_kills


def _is_victim(reason: Json) -> bool:
    """Whether the kernel killed it itself; otherwise, the exit of who was killed is to come."""
    was_killed = reason.get("kind") == "oom_killed" and reason.get("signal_number") == SIGKILL
    return was_killed and reason.get("detector") != "watchdog"


def _after_one_kill(before: OomCounters, last: OomCounters) -> OomCounters:
    return OomCounters(
        _one_more(before.oom_kills, last.oom_kills), _one_more(before.vmstat, last.vmstat)
    )


def _one_more(counted: int | None, newest: int | None) -> int | None:
    return newest if counted is None or newest is None else min(newest, counted + 1)


def _over_own_cap(facts: Json) -> Json:
    from ..processes.exits.exit_reason import Detector, ExitKind, ExitReason

    return ExitReason(
        ExitKind.OOM_KILLED,
        pid=facts["pid"],
        signal_number=9,
        detector=Detector(facts.get("detector") or Detector.CGROUP),
        limit_bytes=facts.get("limit_bytes"),
        peak_bytes=facts.get("peak_bytes"),
        seconds=facts.get("seconds"),
    ).to_json()


def bare_exit(pid: int, status: int | None) -> Json:
    """Return the part of an `ExitReason` that follows from a wait status."""
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
    """Return why a server could not be started: which file, which address, or which limit."""
    if exc.errno == errno.EAGAIN:
        with contextlib.suppress(Exception):  # our modules may be gone, or no descriptor left
            from ..processes.resources.pids_limit import no_room_text

            return no_room_text()
    where = f": {exc.filename}" if exc.filename else ""
    return f"{exc.strerror}{where}"
