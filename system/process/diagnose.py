# SPDX-License-Identifier: Apache-2.0
"""From a wait status and the kernel's counters to an `ExitReason`.

    the process's parent ──▶ `Evidence` ──▶ `diagnose_exit` ──▶ `ExitReason`

`diagnose_exit` is a pure function of the evidence, tested by a table. Its questions come in the
order that `exit_reason.py` lists. What exits below a server is explained by the server itself:
`explain_child`.

Two rules keep a `kill -9` by hand from being reported as out of memory. An unchanged counter of the
cgroup rules memory out, whatever happened elsewhere on the machine. A changed one proves only that
*some* process inside was killed: if the kernel log names only others, it was not this one.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..memory.cgroups import Cgroup
from . import oom_evidence as oom
from .exit_reason import Certainty, Detector, ExitKind, ExitReason
from .proc import split_wait_status

_MEASURED = ("limit_bytes", "peak_bytes", "seconds")
_NOT_COUNTED = oom.OomCounters()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All facts on the end of one process.

    Sizes are in bytes; counters are None if they cannot be read.
    """

    pid: int
    wait_status: int | None  # from `os.waitpid`; None if it could not be reaped
    stopped_by_us: bool = False
    timed_out: bool = False
    # Whether it certainly had no child. Otherwise a kill that its cgroup counted is only probably
    # its own, unless the kernel log names it.
    was_alone: bool = True
    before: oom.OomCounters = _NOT_COUNTED  # when it started
    after: oom.OomCounters = _NOT_COUNTED
    kernel_log_line: str | None = None  # of a kill in its cgroup
    watchdog: str | None = None  # for people, when our own killed it for using too much
    memory_error: bool = False  # it raised `MemoryError`
    cgroup_name: str | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    seconds: float | None = None  # how long it had run

    @property
    def exit_code(self) -> int | None:
        """The exit code; None when a signal ended the process, or it was not reaped."""
        return None if self.wait_status is None else split_wait_status(self.wait_status)[0]

    @property
    def signal_number(self) -> int | None:
        """The signal that ended the process, if one did."""
        return None if self.wait_status is None else split_wait_status(self.wait_status)[1]

    @property
    def knows_cgroup(self) -> bool:
        """Return whether the counters of its cgroup could be read before and after."""
        return None not in (self.before.oom_kills, self.after.oom_kills)

    @property
    def cgroup_killed(self) -> bool:
        """Return whether the kernel killed something in its cgroup for memory."""
        return self.knows_cgroup and self.before.oom_kills != self.after.oom_kills

    @property
    def machine_killed(self) -> bool:
        """Return whether the kernel killed something on the machine for memory."""
        before, after = self.before.vmstat, self.after.vmstat
        return before is not None and after is not None and before != after

    @property
    def cgroup_text(self) -> str:
        """Describe the count of its cgroup, for people."""
        counted = f"{self.before.oom_kills}→{self.after.oom_kills}"
        name = self.cgroup_name or "?"  # a container sees only `/`
        cgroup = "cgroup of its container" if name == "/" else f"cgroup {name}"
        return f"{cgroup}, oom_kill {counted}"


def gather_evidence(
    before: oom.OomCounters,
    cgroup: Cgroup | None,
    pid: int,
    wait_status: int | None,
    *,
    since_monotonic: float = 0.0,
) -> Evidence:
    """Read the counters after an exit, and the kernel log if possible.

    Lines from before `since_monotonic` are ignored: they concern an earlier process with its pid.
    """
    after = oom.read_oom_counters(cgroup)
    moved = before.vmstat is None or before.vmstat != after.vmstat
    own_moved = before.oom_kills is not None and before.oom_kills != after.oom_kills
    line = None
    if moved:
        line = kernel_line(cgroup, pid, since_monotonic=since_monotonic, is_any=own_moved)
    return Evidence(
        pid,
        wait_status,
        before=before,
        after=after,
        kernel_log_line=line,
        cgroup_name=None if cgroup is None else cgroup.name,
    )


def kernel_line(
    cgroup: Cgroup | None, pid: int, *, since_monotonic: float, is_any: bool
) -> str | None:
    """Return the kernel log's line on a kill of `pid`, or if `is_any` of another in its cgroup."""
    directory = None if cgroup is None else cgroup.directory
    lines = of_cgroup(oom.kernel_log_kills(since_monotonic), directory)
    return telling_line(lines, pid) if is_any else _line_about(lines, pid)


def of_cgroup(lines: list[str], directory: str | None) -> list[str]:
    """Return the lines about processes of this cgroup or of an unknown one."""
    if directory is None:
        return lines
    return [line for line in lines if directory.endswith(oom.victims_cgroup(line) or "")]


def telling_line(lines: list[str], pid: int) -> str | None:
    """Return the line that names `pid`, or else the last one."""
    return _line_about(lines, pid) or (lines[-1] if lines else None)


def diagnose_exit(evidence: Evidence) -> ExitReason:
    """Return how the process ended."""
    if evidence.timed_out:
        verdict = ExitReason(ExitKind.TIMED_OUT, evidence.pid)
    elif evidence.stopped_by_us:
        verdict = ExitReason(ExitKind.STOPPED, evidence.pid)
    else:
        verdict = _verdict(evidence)
    return replace(
        verdict,
        exit_code=evidence.exit_code,
        signal_number=evidence.signal_number,
        limit_bytes=evidence.limit_bytes,
        peak_bytes=evidence.peak_bytes,
        seconds=evidence.seconds,
    )


def explain_child(facts: Mapping[str, Any]) -> ExitReason:
    """Return how a process below a server that lives on exited; the server itself calls this.

    The `facts` are those that it reports (`shard_exit` in `schema/protocol.py`), with `limit_bytes`
    and the evidence of a kill for memory, if one explains this exit. All processes of a server have
    the limit together, so that without a line of the kernel log the kill is only probably its own.
    """
    pid, line = facts["pid"], facts.get("kernel_log_line")
    known: dict[str, Any] = {name: facts.get(name) for name in _MEASURED}
    killed = {**known, "signal_number": signal.SIGKILL}
    if why := facts.get("replaced_for"):
        return ExitReason(ExitKind.STOPPED, pid, seconds=known["seconds"], evidence=why)
    if facts.get("programs"):  # that an environment had started: the server does not know which
        victim, name = oom.killed_process(line or "") or (0, None)
        killed |= {"detector": Detector.CGROUP, "victim_name": name}
        return ExitReason(ExitKind.OOM_KILLED, victim, victim_pid=victim or None, **killed)
    of_group = facts.get("oom_kills") or (None, None)
    of_machine = facts.get("machine_oom_kills") or (None, None)
    before, after = map(oom.OomCounters, of_group, of_machine)
    evidence = Evidence(
        pid,
        facts["wait_status"],
        was_alone=bool(facts.get("out_of_memory")),  # over a limit of its own
        before=before,
        after=after,
        kernel_log_line=line,
        watchdog=facts.get("watchdog"),
        cgroup_name=facts.get("cgroup"),
        **known,
    )
    return diagnose_exit(evidence)


def _verdict(known: Evidence) -> ExitReason:
    """Ask the questions in the order of `exit_reason.py`."""
    victim = oom.killed_process(known.kernel_log_line or "")
    named_itself = victim is not None and victim[0] == known.pid
    named_another = victim is not None and victim[0] != known.pid
    was_killed = known.signal_number == signal.SIGKILL
    if was_killed and known.cgroup_killed and not named_another:
        is_proven = named_itself or known.was_alone
        certainty = Certainty.CERTAIN if is_proven else Certainty.PROBABLE
        return _oom(known, Detector.CGROUP, known.cgroup_text, certainty)
    if was_killed and named_itself:
        return _oom(known, Detector.KERNEL_LOG, f"kernel log: {known.kernel_log_line}")
    if known.watchdog is not None:
        return _oom(known, Detector.WATCHDOG, known.watchdog)
    if was_killed and known.machine_killed and not known.knows_cgroup and not named_another:
        counted = f"{known.before.vmstat}→{known.after.vmstat}"
        text = f"SIGKILL, and /proc/vmstat oom_kill {counted}"
        return _oom(known, Detector.VMSTAT, text, Certainty.PROBABLE)
    if known.memory_error:
        return _oom(known, Detector.MEMORY_ERROR, "MemoryError")
    if known.cgroup_killed:
        return _beside_a_kill(known, victim if named_another else None)
    return ExitReason(_plain_kind(known), known.pid)


def _beside_a_kill(known: Evidence, victim: tuple[int, str] | None) -> ExitReason:
    """Return the verdict on a process that was not killed itself, but one below it was.

    If it ended in an error (or unobserved), memory is the likely cause, and the certain one if the
    kernel log names the victim in this cgroup (see `of_cgroup`). If it ended well or by a signal,
    the kill is only a remark in the evidence.
    """
    is_proven = victim is not None and oom.victims_cgroup(known.kernel_log_line or "") is not None
    failed = known.wait_status is None or known.exit_code not in (0, None)
    victim_pid, victim_name = victim or (None, None)
    whom = "a process below it" if victim is None else f"{victim_name} (pid {victim_pid})"
    return ExitReason(
        ExitKind.OOM_KILLED if failed else _plain_kind(known),
        known.pid,
        detector=Detector.CGROUP if failed else None,
        certainty=Certainty.PROBABLE if failed and not is_proven else Certainty.CERTAIN,
        evidence=f"{whom} was killed: {known.cgroup_text}",
        victim_pid=victim_pid,
        victim_name=victim_name,
    )


def _oom(
    known: Evidence, detector: Detector, text: str, certainty: Certainty = Certainty.CERTAIN
) -> ExitReason:
    kind = ExitKind.OOM_KILLED
    return ExitReason(kind, known.pid, certainty=certainty, detector=detector, evidence=text)


def _plain_kind(known: Evidence) -> ExitKind:
    if known.wait_status is None:
        return ExitKind.LOST
    return ExitKind.EXITED if known.signal_number is None else ExitKind.SIGNALED


def _line_about(lines: list[str], pid: int) -> str | None:
    found = [line for line in lines if (oom.killed_process(line) or (None,))[0] == pid]
    return found[-1] if found else None
