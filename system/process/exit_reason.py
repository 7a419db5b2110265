# SPDX-License-Identifier: Apache-2.0
"""`ExitReason`: how a process ended, in one value that looks the same everywhere.

The evidence is gathered by `diagnose.py`, which the process's parent calls.

A kill for memory is claimed in this order, and never on a bare SIGKILL (docs/decisions/0015):

    1. the `oom_kill` counter of the process's own cgroup moved      certain; probable, when the
       kernel log is silent and it may have been a process below it that the kernel killed
    2. the kernel log names the pid                                  certain
    3. our watchdog ended it                                         certain
    4. SIGKILL not ours, and `/proc/vmstat oom_kill` moved           probable
    5. it raised `MemoryError`                                       certain

An engine explains the end of its own containers and jobs, and its explanation counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..text.units import MB
from .proc import signal_name


class ExitKind(StrEnum):
    """The cause of the end of a process."""

    EXITED = "exited"  # it returned from main with `exit_code`
    SIGNALED = "signaled"  # a signal, neither ours nor for memory
    STOPPED = "stopped"  # we asked it to stop, and it did
    OOM_KILLED = "oom_killed"  # out of memory, by one of the detectors
    TIMED_OUT = "timed_out"  # it ran past its time-out and we ended it
    LOST = "lost"  # its exit was not observed; an engine or a shim may know details


class Certainty(StrEnum):
    """The confidence of an explanation."""

    CERTAIN = "certain"
    PROBABLE = "probable"


class Detector(StrEnum):
    """The way in which the cause of an end was detected."""

    CGROUP = "cgroup"
    KERNEL_LOG = "kernel_log"
    WATCHDOG = "watchdog"
    VMSTAT = "vmstat"
    MEMORY_ERROR = "memory_error"
    ENGINE = "engine"  # the engine that ran it says so
    RAY = "ray"  # Ray's own memory monitor, which kills before the kernel would
    SLURM = "slurm"  # Slurm's accounting, which samples now and then


_KILLED_BY: dict[Detector | None, str] = {
    Detector.CGROUP: "was killed by the kernel",
    Detector.KERNEL_LOG: "was killed by the kernel",
    Detector.ENGINE: "was killed by the kernel",
    Detector.RAY: "was killed by Ray's memory monitor",
    Detector.SLURM: "was killed by Slurm's accounting",
    Detector.WATCHDOG: "was ended by openenvd",
}


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The end of one process (or the tree below it), with the evidence.

    Sizes are in bytes, durations in seconds. `evidence` is one line for people, such as
    `cgroup openenvd/long-3, oom_kill 0→1`.
    """

    kind: ExitKind
    pid: int
    exit_code: int | None = None
    signal_number: int | None = None
    certainty: Certainty = Certainty.CERTAIN
    detector: Detector | None = None
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    victim_pid: int | None = None  # the process that was killed, when it was a descendant
    victim_name: str | None = None
    seconds: float | None = None  # how long it had run
    evidence: str | None = None

    @property
    def is_oom(self) -> bool:
        """Return whether memory ended it, certainly or probably."""
        return self.kind is ExitKind.OOM_KILLED

    @property
    def signal_name(self) -> str | None:
        """`SIGKILL` rather than -9; None when no signal ended it."""
        return None if self.signal_number is None else signal_name(self.signal_number)

    def sentence(self, *, shares_limit: bool = False) -> str:
        """Return a clause for people, without its subject: `was killed by SIGSEGV`.

        `shares_limit`: all processes of a replica share the limit, so this one may have used less.
        """
        match self.kind:
            case ExitKind.EXITED if self.evidence is not None and not self.pid:
                return self.evidence  # a shim's text: there was no process
            case ExitKind.EXITED:
                return f"exited with code {self.exit_code}"
            case ExitKind.SIGNALED:
                why = f" ({self.evidence})" if self.evidence else ""
                return f"was killed by {self.signal_name}{why}"
            case ExitKind.STOPPED:
                return self.evidence or "was stopped"
            case ExitKind.OOM_KILLED:
                return self._oom_sentence(shares_limit=shares_limit)
            case ExitKind.TIMED_OUT if self.detector is Detector.ENGINE:
                return f"was stopped at its time-out: {self.evidence}"
            case ExitKind.TIMED_OUT:
                return "was stopped at its time-out"
            case ExitKind.LOST if self.detector is Detector.ENGINE:
                return f"was ended from outside: {self.evidence}"
            case ExitKind.LOST:
                return self.evidence or "disappeared while it was not watched"

    def of_programs(self, count: int, *, is_isolated: bool) -> str:
        """Return a sentence on programs that ended so, and that an environment had started."""
        what = "a program" if count == 1 else f"{count} programs"
        whose = "an isolated session" if is_isolated else "the environment"
        name = f" ({self.victim_name}, pid {self.victim_pid})" if self.victim_name else ""
        how = self.sentence(shares_limit=not is_isolated)
        how = how if count == 1 else how.replace("was ", "were ", 1)
        return f"{what} that {whose} had started{name} {how}"

    def _oom_sentence(self, *, shares_limit: bool) -> str:
        if self.detector is Detector.MEMORY_ERROR:
            return "ran out of memory (MemoryError)"
        counted = self.detector in (Detector.CGROUP, Detector.ENGINE)
        if counted and self.signal_number is None:  # another process was killed
            text = "ran out of memory"
            if self.exit_code is not None:
                text = f"exited with code {self.exit_code} after running out of memory"
            return self._with_limit(text, shares_limit=shares_limit)
        text = _KILLED_BY.get(self.detector, "was killed")
        if self.certainty is Certainty.PROBABLE:
            text = text.replace("was ", "was probably ", 1)
        if self.peak_bytes is not None:
            text += f" for memory at {self.peak_bytes / MB:.0f} MB"
            text += ", pages that it shares included" if shares_limit else ""
        else:
            text += " for using too much memory"
        return self._with_limit(text, shares_limit=shares_limit)

    def _with_limit(self, text: str, *, shares_limit: bool) -> str:
        if self.limit_bytes is not None and shares_limit:
            text += f": its replica's processes may use {self.limit_bytes / MB:.0f} MB together"
        elif self.limit_bytes is not None:
            text += f"; its limit was {self.limit_bytes / MB:.0f} MB"
        return f"{text} ({self.evidence})" if self.evidence else text

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, with the signal's name and number; `from_json` reads it."""
        return {**asdict(self), "signal": self.signal_name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ExitReason:
        """Read what `to_json` wrote; raises `KeyError` or `ValueError` for anything else."""
        fields: dict[str, Any] = {key: data.get(key) for key in cls.__dataclass_fields__}
        fields["kind"] = ExitKind(data["kind"])
        fields["certainty"] = Certainty(data.get("certainty", Certainty.CERTAIN))
        if data.get("detector") is not None:
            fields["detector"] = Detector(data["detector"])
        return cls(**fields)
