# SPDX-License-Identifier: Apache-2.0
"""How a shim's server ended, and with what evidence; or why it could not be started.

The kernel's counters are read before the server starts and at every look, so that what had
happened before a death is not held to be its cause. What they mean is decided in `diagnose.py`,
which is imported when there is a death: a shim imports this module, and is light. When our
modules are gone (upgraded meanwhile) the bare facts are told.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time

from ..processes.exits.oom_evidence import OomCounters, read_oom_counters
from ..system.cgroups import Cgroup
from ..system.json_lines import Json

EXIT_CANNOT_START = 127  # as a shell says it


class ExitEvidence:
    """What was counted while the server lived."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._cgroup: Cgroup | None = None
        self._since = 0.0  # monotonic
        self._counters: list[OomCounters] = []  # the last two looks

    @property
    def oom_kills(self) -> int | None:
        """In the server's cgroup, at the last look; None where there is none to read."""
        return self._counters[-1].oom_kills if self._counters else None

    def begin(self, cgroup: Cgroup | None) -> None:
        """Count for a server that is about to start in `cgroup`."""
        self._cgroup = cgroup
        self._since = time.monotonic()
        self._counters = [read_oom_counters(cgroup)]

    def look(self) -> bool:
        """Count while the server lives; whether somebody was killed for memory since.

        The last but one look is kept too: a kill is counted before its victim is dead.
        """
        counters = read_oom_counters(self._cgroup)
        moved = bool(self._counters) and counters.oom_kills != self._counters[-1].oom_kills
        self._counters = [*self._counters[-1:], counters]
        return moved

    def explain(
        self, pid: int, ended: tuple[int, int] | None, *, is_wanted: bool, failed: str | None
    ) -> Json:
        """The server's `ExitReason` as JSON.

        `ended`: its wait status and its most resident bytes; None when it was not collected.
        `failed`: what it said itself.
        """
        status, most_resident_bytes = ended or (None, None)
        peak = self._cgroup.peak_bytes() if self._cgroup is not None else None
        try:
            from dataclasses import replace

            from ..processes.exits.diagnose import diagnose_exit, gather_evidence

            evidence = replace(
                gather_evidence(
                    self._counters[0], self._cgroup, pid, status, since_monotonic=self._since
                ),
                stopped_by_us=is_wanted,
                peak_bytes=peak or most_resident_bytes,
                limit_bytes=self._limit_bytes,
                memory_error=(failed or "").startswith("MemoryError"),
                seconds=time.monotonic() - self._since,
            )
            return diagnose_exit(evidence).to_json()
        except Exception as exc:  # keeping the replica matters more than explaining its past
            print(f"shim: cannot explain an exit: {exc!r}", file=sys.stderr)  # noqa: T201
            return bare_exit(pid, status)

    def explain_shard(self, facts: Json) -> Json:
        """What the server told of a child of its own that died, with the reason if there is one."""
        told = facts
        try:
            from .shard_exits import told_of_shard

            told = told_of_shard(
                facts, self._counters[0], self._cgroup, self._limit_bytes, self._since
            )
        except Exception as exc:
            print(f"shim: cannot explain a shard's exit: {exc!r}", file=sys.stderr)  # noqa: T201
        self._counters = [read_oom_counters(self._cgroup)]  # what it died of is no later one's
        return told


def bare_exit(pid: int, status: int | None) -> Json:
    """As much of an `ExitReason` as a wait status tells."""
    if status is None:
        return {"kind": "lost", "pid": pid}
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"kind": "signaled", "pid": pid, "signal_number": -code}
    return {"kind": "exited", "pid": pid, "exit_code": code}


def exit_without_start(why: str) -> Json:
    """The `ExitReason` of a server that never ran."""
    return {"kind": "exited", "pid": 0, "exit_code": EXIT_CANNOT_START, "evidence": why}


def why_no_server(exc: OSError) -> str:
    """Why it could not be started: which file, which address, or which limit."""
    if exc.errno == errno.EAGAIN:
        with contextlib.suppress(Exception):  # our modules may be gone, or no descriptor left
            from ..processes.resources.pids_limit import no_room_text

            return no_room_text()
    where = f": {exc.filename}" if exc.filename else ""
    return f"{exc.strerror}{where}"
