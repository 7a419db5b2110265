# SPDX-License-Identifier: Apache-2.0
"""From a wait status and the kernel's counters to an `ExitReason`.

`explain_exit` is a pure function, tested by a table; the order of its questions is the order in
`exit_reason.py`. `evidence_after` reads what it needs, beside the counters
of before (`read_oom_counters`).

Two rules keep a `kill -9` by hand from being called out of memory. A cgroup's counter that stood
still rules memory out, whatever happened elsewhere on the machine. One that moved proves that
*something* inside was killed: when the kernel log names only others, the process was not it.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple, TypedDict

from ...system.cgroups import Cgroup
from .exit_reason import Certainty, Detector, ExitKind, ExitReason
from .oom_evidence import (
    OomCounters,
    kernel_log_kills,
    killed_process,
    read_oom_counters,
    victims_cgroup,
)


class Evidence(TypedDict):
    """Arguments of `explain_exit`, as `evidence_after` gathers them."""

    oom_kills_before: int | None
    oom_kills_after: int | None
    vmstat_before: int | None
    vmstat_after: int | None
    kernel_log_line: str | None
    cgroup_name: str | None


def evidence_after(
    before: OomCounters, cgroup: Cgroup | None, pid: int, *, since_monotonic: float = 0.0
) -> Evidence:
    """The counters after its death, and the kernel's own words when they can be read.

    `since_monotonic` (`time.monotonic()` at its start) keeps an earlier bearer of the pid out.
    """
    after = read_oom_counters(cgroup)
    moved = before.vmstat is None or before.vmstat != after.vmstat
    directory = None if cgroup is None else cgroup.directory
    lines = of_cgroup(kernel_log_kills(since_monotonic), directory) if moved else []
    return Evidence(
        oom_kills_before=before.oom_kills,
        oom_kills_after=after.oom_kills,
        vmstat_before=before.vmstat,
        vmstat_after=after.vmstat,
        kernel_log_line=telling_line(lines, pid) if _moved(before, after) else _of(lines, pid),
        cgroup_name=None if cgroup is None else cgroup.name,
    )


def of_cgroup(lines: list[str], directory: str | None) -> list[str]:
    """The lines about processes of this cgroup; those that do not tell theirs are kept."""
    if directory is None:
        return lines
    return [line for line in lines if directory.endswith(victims_cgroup(line) or "")]


def telling_line(lines: list[str], pid: int) -> str | None:
    """The line that names `pid`, or else the last one."""
    return _of(lines, pid) or (lines[-1] if lines else None)


def explain_exit(
    wait_status: int | None,
    *,
    pid: int,
    stopped_by_us: bool = False,
    timed_out: bool = False,
    was_alone: bool = True,
    oom_kills_before: int | None = None,
    oom_kills_after: int | None = None,
    vmstat_before: int | None = None,
    vmstat_after: int | None = None,
    kernel_log_line: str | None = None,
    watchdog: str | None = None,
    memory_error: bool = False,
    cgroup_name: str | None = None,
    peak_bytes: int | None = None,
    limit_bytes: int | None = None,
    seconds: float | None = None,
) -> ExitReason:
    """How the process ended.

    `wait_status` is what `os.waitpid` gave, or None when nobody could collect it. `watchdog` is
    our own watchdog's evidence when it ended the process, `memory_error` whether it raised one.
    `was_alone` is False when a process below it may have been the one that the cgroup counted:
    then, unless the kernel log tells, a SIGKILL is only probably the kernel's.
    """
    exit_code, number = _decode(wait_status)
    counters = _Counters(
        oom_kills_before, oom_kills_after, vmstat_before, vmstat_after, cgroup_name
    )
    if stopped_by_us or timed_out:
        kind = ExitKind.TIMED_OUT if timed_out else ExitKind.STOPPED
        verdict = _Verdict(kind)
    else:
        verdict = _verdict(
            wait_status,
            pid,
            number,
            exit_code,
            counters,
            kernel_log_line,
            watchdog,
            memory_error,
            was_alone,
        )
    return ExitReason(
        kind=verdict.kind,
        pid=pid,
        exit_code=exit_code,
        signal_number=number,
        certainty=verdict.certainty,
        detector=verdict.detector,
        limit_bytes=limit_bytes,
        peak_bytes=peak_bytes,
        victim_pid=verdict.victim_pid,
        victim_name=verdict.victim_name,
        seconds=seconds,
        evidence=verdict.evidence,
    )


class _Counters(NamedTuple):
    before: int | None
    after: int | None
    vmstat_before: int | None
    vmstat_after: int | None
    cgroup_name: str | None

    @property
    def are_known(self) -> bool:
        return self.before is not None and self.after is not None

    @property
    def own_moved(self) -> bool:
        return self.are_known and self.before != self.after

    @property
    def machine_moved(self) -> bool:
        known = self.vmstat_before is not None and self.vmstat_after is not None
        return known and self.vmstat_before != self.vmstat_after

    @property
    def own_text(self) -> str:
        return f"cgroup {self.cgroup_name or '?'}, oom_kill {self.before}→{self.after}"

    @property
    def machine_text(self) -> str:
        return f"SIGKILL, and /proc/vmstat oom_kill {self.vmstat_before}→{self.vmstat_after}"


class _Verdict(NamedTuple):
    kind: ExitKind
    detector: Detector | None = None
    certainty: Certainty = Certainty.CERTAIN
    evidence: str | None = None
    victim_pid: int | None = None
    victim_name: str | None = None


def _verdict(
    wait_status: int | None,
    pid: int,
    number: int | None,
    exit_code: int | None,
    counters: _Counters,
    kernel_log_line: str | None,
    watchdog: str | None,
    memory_error: bool,
    was_alone: bool,
) -> _Verdict:
    """The questions, in the order of `exit_reason.py`."""
    victim = killed_process(kernel_log_line or "")
    named_itself = victim is not None and victim[0] == pid
    named_another = victim is not None and victim[0] != pid
    was_killed = number == signal.SIGKILL
    if was_killed and counters.own_moved and not named_another:
        is_proven = named_itself or was_alone
        certainty = Certainty.CERTAIN if is_proven else Certainty.PROBABLE
        return _oom(Detector.CGROUP, counters.own_text, certainty)
    if was_killed and named_itself:
        return _oom(Detector.KERNEL_LOG, f"kernel log: {kernel_log_line}")
    if watchdog is not None:
        return _oom(Detector.WATCHDOG, watchdog)
    if was_killed and counters.machine_moved and not counters.are_known and not named_another:
        return _oom(Detector.VMSTAT, counters.machine_text, Certainty.PROBABLE)
    if memory_error:
        return _oom(Detector.MEMORY_ERROR, "MemoryError")
    if counters.own_moved:
        victim_is_ours = victims_cgroup(kernel_log_line or "") is not None  # see `of_cgroup`
        return _beside_a_kill(
            wait_status, number, exit_code, counters, victim, named_another, victim_is_ours
        )
    return _Verdict(_plain_kind(wait_status, number))


def _beside_a_kill(
    wait_status: int | None,
    number: int | None,
    exit_code: int | None,
    counters: _Counters,
    victim: tuple[int, str] | None,
    named_another: bool,
    victim_is_ours: bool,
) -> _Verdict:
    """Something below the process was killed for memory, and then it ended in its own way.

    When it ended in an error (or out of sight), memory is the likely cause, and the certain one
    when the kernel named the victim, in this very cgroup; when it ended well or by somebody's
    signal, the kill is told as a remark.
    """
    victim_pid, victim_name = victim if victim is not None and named_another else (None, None)
    failed = wait_status is None or (number is None and exit_code != 0)
    whom = "a process below it" if victim_pid is None else f"{victim_name} (pid {victim_pid})"
    is_proven = named_another and victim_is_ours
    return _Verdict(
        ExitKind.OOM_KILLED if failed else _plain_kind(wait_status, number),
        Detector.CGROUP if failed else None,
        Certainty.PROBABLE if failed and not is_proven else Certainty.CERTAIN,
        f"{whom} was killed: {counters.own_text}",
        victim_pid,
        victim_name,
    )


def _oom(detector: Detector, evidence: str, certainty: Certainty = Certainty.CERTAIN) -> _Verdict:
    return _Verdict(ExitKind.OOM_KILLED, detector, certainty, evidence)


def _plain_kind(wait_status: int | None, number: int | None) -> ExitKind:
    if wait_status is None:
        return ExitKind.LOST
    return ExitKind.EXITED if number is None else ExitKind.SIGNALED


def _decode(wait_status: int | None) -> tuple[int | None, int | None]:
    """Exit code, or else the number of the signal."""
    if wait_status is None:
        return None, None
    code = os.waitstatus_to_exitcode(wait_status)
    return (None, -code) if code < 0 else (code, None)


def _moved(before: OomCounters, after: OomCounters) -> bool:
    return before.oom_kills is not None and before.oom_kills != after.oom_kills


def _of(lines: list[str], pid: int) -> str | None:
    return next((line for line in reversed(lines) if _names(line, pid)), None)


def _names(line: str, pid: int) -> bool:
    killed = killed_process(line)
    return killed is not None and killed[0] == pid
