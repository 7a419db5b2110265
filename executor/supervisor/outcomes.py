# SPDX-License-Identifier: Apache-2.0
"""How a task's end becomes an event: from what its worker said, or from how the worker died.

Pure, but for reading the tail of the log. The trees of the dead are ended in `trees.py`.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from ...processes.exits.diagnose import Evidence as ExitEvidence
from ...processes.exits.diagnose import diagnose_exit, of_cgroup, telling_line
from ...processes.exits.exit_reason import ExitKind, ExitReason
from ...processes.exits.oom_evidence import kernel_log_kills
from ...system.file_tail import last_lines
from ..messages import Cancelled, Died, ExecutorEvent, Raised, Succeeded, TaskError
from ..policy.memory_caps import Offence
from .pool import PooledWorker, Run, StopReason
from .worker_cgroups import CgroupReading

Frame = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of how a task's worker ended. Sizes in bytes."""

    pid: int
    status: int | None  # as of wait(2); None when nobody told, or the worker lives
    seconds: float
    stop_reason: StopReason | None = None
    cgroup: CgroupReading | None = None
    machine_oom_kills: int | None = None  # during the task; None where a cgroup tells better
    memory_error: bool = False
    peak_bytes: int | None = None
    kernel_log_line: str | None = None
    offence: Offence | None = None  # for which the watchdog ended it
    was_alone: bool = True  # it had no child that the kernel may have killed instead


def conclusion(
    worker: PooledWorker, run: Run, frame: Frame, cgroup: CgroupReading | None, tail_lines: int
) -> ExecutorEvent:
    """The event of a task whose worker lives: what it says, unless we know better."""
    task_id, now, peak = run.task.id, time.time(), frame["peak_bytes"]
    if frame["kind"] == "succeeded":
        return Succeeded(task_id, frame["result"], peak, now)
    if run.stop_reason is StopReason.CANCELLED:
        return Cancelled(task_id, now)
    raised = frame["kind"] == "raised"
    evidence = Evidence(
        pid=worker.pid,
        # A worker that reports a cancellation nobody asked for was sent SIGTERM by somebody else.
        status=None if raised else int(signal.SIGTERM),
        seconds=time.monotonic() - run.started,
        stop_reason=run.stop_reason,
        cgroup=cgroup,
        kernel_log_line=kernel_log_line(worker.pid, run.started, cgroup),
        memory_error=raised and frame["error"]["type"] == "MemoryError",
        peak_bytes=peak,
    )
    if raised and not (is_memory(evidence) or run.stop_reason):
        return Raised(task_id, TaskError(**frame["error"]), peak, now)
    tail = tuple(last_lines(run.task.log_path, tail_lines))
    return Died(task_id, worker.name, explain(evidence), tail, peak, now)


def death(
    worker: PooledWorker, run: Run, cgroup: CgroupReading | None, tail_lines: int
) -> ExecutorEvent:
    """The event of a task whose worker is dead."""
    now = time.time()
    if run.stop_reason is StopReason.CANCELLED:
        return Cancelled(run.task.id, now)
    exited = worker.exited
    status = None if exited is None else exited.status
    cgroup = _of_its_end(cgroup, status)
    killed_machine_wide = None
    if cgroup is None and run.machine_oom_kills is not None:
        killed_machine_wide = (machine_oom_kills() or 0) - run.machine_oom_kills
    evidence = Evidence(
        pid=worker.pid,
        status=status,
        seconds=time.monotonic() - run.started,
        stop_reason=run.stop_reason,
        cgroup=cgroup,
        kernel_log_line=kernel_log_line(worker.pid, run.started, cgroup),
        machine_oom_kills=killed_machine_wide,
        peak_bytes=None if exited is None else exited.peak_bytes,
        offence=worker.offence,
        was_alone=exited is not None and exited.was_alone,
    )
    exit_reason = explain(evidence)
    tail = tuple(last_lines(run.task.log_path, tail_lines))
    return Died(run.task.id, worker.name, exit_reason, tail, exit_reason.peak_bytes, now)


def never_started(run: Run, why: str, *, stopped: bool) -> Died:
    """The event of a task that no worker ever took."""
    kind = ExitKind.STOPPED if stopped else ExitKind.LOST
    return Died(run.task.id, "", ExitReason(kind, pid=0, evidence=why), (), None, time.time())


def is_memory(evidence: Evidence) -> bool:
    """Whether memory ended it, for certain."""
    return evidence.memory_error or (evidence.cgroup is not None and evidence.cgroup.moved)


def explain(known: Evidence) -> ExitReason:
    """The reason, in the order of `ExitReason`'s docstring; never memory on a bare SIGKILL."""
    cgroup = known.cgroup
    of_cgroup: dict[str, Any] = {}
    if cgroup is not None:
        of_cgroup = {
            "oom_kills_before": cgroup.oom_kills_before,
            "oom_kills_after": cgroup.oom_kills_after,
            "cgroup_name": f"openenvd/{cgroup.name}",
            "limit_bytes": cgroup.limit_bytes,
        }
    peaks = [known.peak_bytes, None if cgroup is None else cgroup.peak_bytes]
    if known.offence is not None:
        of_cgroup["limit_bytes"] = known.offence.limit_bytes
        peaks = [known.offence.held_bytes]  # of the whole tree, and what it was ended for
    return diagnose_exit(
        ExitEvidence(
            known.pid,
            known.status,
            stopped_by_us=known.stop_reason is StopReason.SHUT_DOWN,
            timed_out=known.stop_reason is StopReason.TIMED_OUT,
            was_alone=known.was_alone,
            machine_oom_kills_before=None if known.machine_oom_kills is None else 0,
            machine_oom_kills_after=known.machine_oom_kills,
            kernel_log_line=known.kernel_log_line,
            watchdog=None if known.offence is None else known.offence.evidence,
            memory_error=known.memory_error,
            peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
            seconds=known.seconds,
            **of_cgroup,
        )
    )


def _of_its_end(cgroup: CgroupReading | None, status: int | None) -> CgroupReading | None:
    """The reading without what was counted before the death began.

    Of a worker that exited any kill may be the cause, also of a grandchild and long ago. But of
    SIGKILL, or of an end that nobody saw, the kernel is the cause only if it killed just now.
    """
    if cgroup is None or not (status is None or status & 0x7F == signal.SIGKILL):
        return cgroup
    return replace(cgroup, oom_kills_before=cgroup.oom_kills_noted)


def kernel_log_line(pid: int, since_monotonic: float, cgroup: CgroupReading | None) -> str | None:
    """What the kernel log, if readable, says of a kill that the cgroup counted."""
    if cgroup is None or not cgroup.moved:
        return None
    lines = of_cgroup(kernel_log_kills(since_monotonic), cgroup.directory)
    return telling_line(lines, pid)


def machine_oom_kills() -> int | None:
    """How many processes the kernel has killed for memory; None where it does not say."""
    try:
        with open("/proc/vmstat", "rb") as file:
            counters = file.read()
    except OSError:
        return None
    _, found, rest = counters.partition(b"\noom_kill ")
    return int(rest.split(b"\n", 1)[0]) if found else None
