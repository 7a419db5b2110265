# SPDX-License-Identifier: Apache-2.0
"""From a wait status and the kernel's counters to an `ExitReason`.

    the process's parent ──▶ `Evidence` ──▶ `diagnose_exit` ──▶ `ExitReason`

`Evidence` is everything that is known of one process's end; `diagnose_exit` is a pure function of
it, tested by a table. Its questions come in the order that `exit_reason.py` lists.
`gather_evidence` reads the counters after an exit, given those of before (`read_oom_counters`). Of
what exits below a server the server itself counts and reports: `explain_child`.

Two rules keep a `kill -9` by hand from being called out of memory. A cgroup's counter that stood
still rules memory out, whatever happened elsewhere on the machine. One that moved proves that
*something* inside was killed: when the kernel log names only others, the process was not it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..memory.cgroups import Cgroup
from .exit_reason import Certainty, Detector, ExitKind, ExitReason
from .oom_evidence import (
    OomCounters,
    kernel_log_kills,
    killed_process,
    read_oom_counters,
    victims_cgroup,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known of how one process ended.

    Sizes are in bytes, counters are None where there is none to read.

    Attributes:
        wait_status: as `os.waitpid` gave it; None when it could not be reaped.
        was_alone: whether it certainly had no child. When it had one, a SIGKILL that its cgroup
            counted is only probably its own, unless the kernel log names it.
        oom_kills_before: counted in its cgroup when it started.
        machine_oom_kills_before: the same of the whole machine, from `/proc/vmstat`.
        kernel_log_line: what the kernel log says of a kill in its cgroup.
        watchdog: one line for people, when our own watchdog killed it for using too much.
        memory_error: whether it raised `MemoryError`.
        seconds: how long it had run.
    """

    pid: int
    wait_status: int | None
    stopped_by_us: bool = False
    timed_out: bool = False
    was_alone: bool = True
    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    machine_oom_kills_before: int | None = None
    machine_oom_kills_after: int | None = None
    kernel_log_line: str | None = None
    watchdog: str | None = None
    memory_error: bool = False
    cgroup_name: str | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    seconds: float | None = None

    @property
    def exit_code(self) -> int | None:
        """The exit code; None when a signal ended the process, or it was not reaped."""
        code = self._code()
        return None if code is None or code < 0 else code

    @property
    def signal_number(self) -> int | None:
        """The signal that ended the process, if one did."""
        code = self._code()
        return None if code is None or code >= 0 else -code

    @property
    def knows_cgroup(self) -> bool:
        """Return whether the counters of its cgroup could be read before and after."""
        return self.oom_kills_before is not None and self.oom_kills_after is not None

    @property
    def cgroup_killed(self) -> bool:
        """Return whether the kernel killed something in its cgroup for memory."""
        return self.knows_cgroup and self.oom_kills_before != self.oom_kills_after

    @property
    def machine_killed(self) -> bool:
        """Return whether the kernel killed something on the machine for memory."""
        before, after = self.machine_oom_kills_before, self.machine_oom_kills_after
        return before is not None and after is not None and before != after

    @property
    def cgroup_text(self) -> str:
        """Return what its cgroup counted, for people."""
        counted = f"{self.oom_kills_before}→{self.oom_kills_after}"
        name = self.cgroup_name or "?"  # `/` is all that is seen in a container
        cgroup = "cgroup of its container" if name == "/" else f"cgroup {name}"
        return f"{cgroup}, oom_kill {counted}"

    def _code(self) -> int | None:
        return None if self.wait_status is None else os.waitstatus_to_exitcode(self.wait_status)


def gather_evidence(
    before: OomCounters,
    cgroup: Cgroup | None,
    pid: int,
    wait_status: int | None,
    *,
    since_monotonic: float = 0.0,
) -> Evidence:
    """Read the counters after an exit, and the kernel's own words where they can be read.

    What the kernel log says from before `since_monotonic`, of an earlier process with the same pid,
    is left out.
    """
    after = read_oom_counters(cgroup)
    moved = before.vmstat is None or before.vmstat != after.vmstat
    own_moved = before.oom_kills is not None and before.oom_kills != after.oom_kills
    line = None
    if moved:
        line = kernel_line(cgroup, pid, since_monotonic=since_monotonic, is_any=own_moved)
    return Evidence(
        pid,
        wait_status,
        oom_kills_before=before.oom_kills,
        oom_kills_after=after.oom_kills,
        machine_oom_kills_before=before.vmstat,
        machine_oom_kills_after=after.vmstat,
        kernel_log_line=line,
        cgroup_name=None if cgroup is None else cgroup.name,
    )


def kernel_line(
    cgroup: Cgroup | None,
    pid: int,
    *,
    since_monotonic: float,
    is_any: bool,
    known: Collection[int] = (),
) -> str | None:
    """Return what the kernel log says of a kill of `pid`.

    If `is_any`, or else of one in its cgroup, but of none of the pids that are `known`.
    """
    directory = None if cgroup is None else cgroup.directory
    lines = of_cgroup(kernel_log_kills(since_monotonic), directory)
    if known:
        victims = [(killed_process(line) or (0, ""))[0] for line in lines]
        lines = [line for line, victim in zip(lines, victims, strict=True) if victim not in known]
    return telling_line(lines, pid) if is_any else _line_about(lines, pid)


def of_cgroup(lines: list[str], directory: str | None) -> list[str]:
    """The lines about processes of this cgroup; those that do not tell theirs are kept."""
    if directory is None:
        return lines
    return [line for line in lines if directory.endswith(victims_cgroup(line) or "")]


def telling_line(lines: list[str], pid: int) -> str | None:
    """The line that names `pid`, or else the last one."""
    return _line_about(lines, pid) or (lines[-1] if lines else None)


def diagnose_exit(evidence: Evidence) -> ExitReason:
    """Return how the process ended."""
    if evidence.stopped_by_us or evidence.timed_out:
        verdict = _Verdict(ExitKind.TIMED_OUT if evidence.timed_out else ExitKind.STOPPED)
    else:
        verdict = _verdict(evidence)
    return ExitReason(
        **verdict._asdict(),
        pid=evidence.pid,
        exit_code=evidence.exit_code,
        signal_number=evidence.signal_number,
        limit_bytes=evidence.limit_bytes,
        peak_bytes=evidence.peak_bytes,
        seconds=evidence.seconds,
    )


def explain_child(
    facts: Mapping[str, Any], *, limit_bytes: int | None, kernel_log_line: str | None = None
) -> ExitReason:
    """Return how a process below a server that lives on exited.

    Args:
        facts: What the server has reported of it (`shard_exit` in `schema/protocol.py`): it
            counts kills in its own cgroup, and says which of them belong to which exit.
        limit_bytes: The memory limit of all processes of the server together.
        kernel_log_line: What the kernel log says of a kill in their cgroup, where it can be read.
    """
    if facts.get("out_of_memory"):  # over the cap of its own, which the server put on it
        return _over_own_cap(facts)
    if facts.get("replaced_for"):
        pid, why = facts["pid"], facts["replaced_for"]
        return ExitReason(ExitKind.STOPPED, pid=pid, seconds=facts.get("seconds"), evidence=why)
    if facts.get("programs"):
        return _program(facts, limit_bytes, kernel_log_line)
    before, after = facts.get("oom_kills") or (None, None)
    of_machine = facts.get("machine_oom_kills") or (None, None)
    evidence = Evidence(
        facts["pid"],
        facts["wait_status"],
        oom_kills_before=before,
        oom_kills_after=after,
        machine_oom_kills_before=of_machine[0],
        machine_oom_kills_after=of_machine[1],
        kernel_log_line=kernel_log_line,
        cgroup_name=facts.get("cgroup"),
        peak_bytes=facts.get("peak_bytes"),
        limit_bytes=limit_bytes,
        seconds=facts.get("seconds"),
    )
    return diagnose_exit(evidence)


class _Verdict(NamedTuple):
    kind: ExitKind
    detector: Detector | None = None
    certainty: Certainty = Certainty.CERTAIN
    evidence: str | None = None
    victim_pid: int | None = None
    victim_name: str | None = None


def _verdict(known: Evidence) -> _Verdict:
    """The questions, in the order of `exit_reason.py`."""
    victim = killed_process(known.kernel_log_line or "")
    named_itself = victim is not None and victim[0] == known.pid
    named_another = victim is not None and victim[0] != known.pid
    was_killed = known.signal_number == signal.SIGKILL
    if was_killed and known.cgroup_killed and not named_another:
        is_proven = named_itself or known.was_alone
        certainty = Certainty.CERTAIN if is_proven else Certainty.PROBABLE
        return _oom(Detector.CGROUP, known.cgroup_text, certainty)
    if was_killed and named_itself:
        return _oom(Detector.KERNEL_LOG, f"kernel log: {known.kernel_log_line}")
    if known.watchdog is not None:
        return _oom(Detector.WATCHDOG, known.watchdog)
    if was_killed and known.machine_killed and not known.knows_cgroup and not named_another:
        counted = f"{known.machine_oom_kills_before}→{known.machine_oom_kills_after}"
        text = f"SIGKILL, and /proc/vmstat oom_kill {counted}"
        return _oom(Detector.VMSTAT, text, Certainty.PROBABLE)
    if known.memory_error:
        return _oom(Detector.MEMORY_ERROR, "MemoryError")
    if known.cgroup_killed:
        return _beside_a_kill(known, victim if named_another else None)
    return _Verdict(_plain_kind(known))


def _beside_a_kill(known: Evidence, victim: tuple[int, str] | None) -> _Verdict:
    """Return the verdict on a process that exited otherwise, after one below it was killed.

    When it ended in an error (or out of sight), memory is the likely cause, and the certain one
    when the kernel named the victim, in this very cgroup (see `of_cgroup`); when it ended well or
    by a signal, the kill is a remark in the evidence.
    """
    is_proven = victim is not None and victims_cgroup(known.kernel_log_line or "") is not None
    failed = known.wait_status is None or known.exit_code not in (0, None)
    victim_pid, victim_name = victim or (None, None)
    whom = "a process below it" if victim is None else f"{victim_name} (pid {victim_pid})"
    return _Verdict(
        ExitKind.OOM_KILLED if failed else _plain_kind(known),
        Detector.CGROUP if failed else None,
        Certainty.PROBABLE if failed and not is_proven else Certainty.CERTAIN,
        f"{whom} was killed: {known.cgroup_text}",
        victim_pid,
        victim_name,
    )


def _oom(detector: Detector, evidence: str, certainty: Certainty = Certainty.CERTAIN) -> _Verdict:
    return _Verdict(ExitKind.OOM_KILLED, detector, certainty, evidence)


def _plain_kind(known: Evidence) -> ExitKind:
    if known.wait_status is None:
        return ExitKind.LOST
    return ExitKind.EXITED if known.signal_number is None else ExitKind.SIGNALED


def _over_own_cap(facts: Mapping[str, Any]) -> ExitReason:
    return ExitReason(
        ExitKind.OOM_KILLED,
        pid=facts["pid"],
        signal_number=signal.SIGKILL,
        detector=Detector(facts.get("detector") or Detector.CGROUP),
        limit_bytes=facts.get("limit_bytes"),
        peak_bytes=facts.get("peak_bytes"),
        seconds=facts.get("seconds"),
    )


def _program(facts: Mapping[str, Any], limit_bytes: int | None, line: str | None) -> ExitReason:
    """Return the end of what an environment had started: the server does not know which it was."""
    pid, name = killed_process(line or "") or (0, None)
    return ExitReason(
        ExitKind.OOM_KILLED,
        pid=pid,
        signal_number=signal.SIGKILL,
        detector=Detector.CGROUP,
        limit_bytes=facts.get("limit_bytes") or limit_bytes,
        peak_bytes=facts.get("peak_bytes"),
        victim_pid=pid or None,
        victim_name=name,
    )


def _line_about(lines: list[str], pid: int) -> str | None:
    for line in reversed(lines):
        killed = killed_process(line)
        if killed is not None and killed[0] == pid:
            return line
    return None
