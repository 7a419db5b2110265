# SPDX-License-Identifier: Apache-2.0
"""How a task's end becomes an event: from what its worker said, or from how the worker died.

Pure, but for reading the tail of the log. The trees of the dead are ended in `trees.py`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from ..processes.exit_reason import Certainty, Detector, ExitKind, ExitReason
from ..processes.tail import last_lines
from .messages import Cancelled, Died, ExecutorEvent, Raised, Succeeded, TaskError
from .pool import PooledWorker, Run, StopReason
from .worker_cgroups import CgroupReading

Frame = dict[str, Any]

_STOPPED_KINDS = {
    StopReason.TIMED_OUT: ExitKind.TIMED_OUT,
    StopReason.SHUT_DOWN: ExitKind.STOPPED,
}


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
    killed_machine_wide = None
    if cgroup is None and run.machine_oom_kills is not None:
        killed_machine_wide = (machine_oom_kills() or 0) - run.machine_oom_kills
    evidence = Evidence(
        pid=worker.pid,
        status=None if exited is None else exited.status,
        seconds=time.monotonic() - run.started,
        stop_reason=run.stop_reason,
        cgroup=cgroup,
        machine_oom_kills=killed_machine_wide,
        peak_bytes=None if exited is None else exited.peak_bytes,
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


def explain(evidence: Evidence) -> ExitReason:
    """The reason, in the order of `ExitReason`'s docstring; never memory on a bare SIGKILL."""
    if evidence.cgroup is not None and evidence.cgroup.moved:
        return _out_of_memory(evidence, Detector.CGROUP, evidence.cgroup.evidence)
    if evidence.stop_reason in _STOPPED_KINDS:
        return _reason(evidence, _STOPPED_KINDS[evidence.stop_reason])
    if evidence.memory_error:
        return _out_of_memory(evidence, Detector.MEMORY_ERROR, "MemoryError")
    if evidence.status is None:
        return _reason(evidence, ExitKind.LOST)
    if os.WIFEXITED(evidence.status):
        return _reason(evidence, ExitKind.EXITED, exit_code=os.WEXITSTATUS(evidence.status))
    number = os.WTERMSIG(evidence.status)
    if number == signal.SIGKILL and evidence.machine_oom_kills:
        told = f"/proc/vmstat oom_kill moved by {evidence.machine_oom_kills}"
        return _out_of_memory(evidence, Detector.VMSTAT, told)
    return _reason(evidence, ExitKind.SIGNALED, signal_number=number)


def _out_of_memory(evidence: Evidence, detector: Detector, told: str) -> ExitReason:
    cgroup = evidence.cgroup
    by_cgroup = detector is Detector.CGROUP and cgroup is not None
    return _reason(
        evidence,
        ExitKind.OOM_KILLED,
        detector=detector,
        certainty=Certainty.PROBABLE if detector is Detector.VMSTAT else Certainty.CERTAIN,
        limit_bytes=cgroup.limit_bytes if by_cgroup and cgroup else None,
        peak_bytes=cgroup.peak_bytes if by_cgroup and cgroup else evidence.peak_bytes,
        signal_number=int(signal.SIGKILL) if _was_killed(evidence) else None,
        evidence=told,
    )


def _was_killed(evidence: Evidence) -> bool:
    status = evidence.status
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _reason(known: Evidence, kind: ExitKind, **more: Any) -> ExitReason:
    fields = {"peak_bytes": known.peak_bytes, "seconds": known.seconds, **more}
    return ExitReason(kind, known.pid, **fields)


def machine_oom_kills() -> int | None:
    """How many processes the kernel has killed for memory; None where it does not say."""
    try:
        with open("/proc/vmstat", "rb") as file:
            counters = file.read()
    except OSError:
        return None
    _, found, rest = counters.partition(b"\noom_kill ")
    return int(rest.split(b"\n", 1)[0]) if found else None
