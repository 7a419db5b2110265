# SPDX-License-Identifier: Apache-2.0
"""From what an engine knows of an exit to an `ExitReason`: the same value as a local replica's."""

from __future__ import annotations

from ...system.process.exit_reason import Detector, ExitKind, ExitReason
from ..engines.base import ExitFacts

_SIGNALED = 128  # added to a signal's number, by the convention of shells
_LAST_SIGNAL = 64
SAME_SECONDS = 1.0  # between the engine's word of a kill and the server's own count of it


def exit_reason(
    facts: ExitFacts | None,
    *,
    pid: int,
    stopped_by_us: bool,
    limit_bytes: int | None,
    oom_reported_at: float | None = None,
) -> ExitReason:
    """Explain how an instance ended.

    What an engine says of memory (`OOMKilled`, `OUT_OF_MEMORY`) it says of everything that was ever
    killed in the instance. It is the cause of this exit when the server, which reports kills below
    it, has reported none; or when the engine tells of a kill after the last of these.

    Args:
        facts: What the engine knows; None: it has no such instance any more.
        pid: Its first process; 0: unknown.
        stopped_by_us: Whether its stop had been requested.
        limit_bytes: Its memory limit.
        oom_reported_at: When its server has last reported a kill below it, seconds since the epoch.
    """
    if facts is None:
        return ExitReason(ExitKind.STOPPED if stopped_by_us else ExitKind.LOST, pid=pid)
    if facts.error is not None:
        return ExitReason(ExitKind.EXITED, pid=0, exit_code=127, evidence=facts.error)
    if facts.ended_by is not None and not stopped_by_us:
        kind = ExitKind.TIMED_OUT if facts.is_time_over else ExitKind.LOST
        detector, evidence = Detector.ENGINE, facts.ended_by
        return ExitReason(
            kind, pid=pid, detector=detector, seconds=facts.seconds, evidence=evidence
        )
    if facts.reason is not None and not stopped_by_us:
        return ExitReason.from_json(facts.reason)
    code, number = _code_and_signal(facts.exit_code)
    is_oom = facts.is_oom and _is_its_own(facts.oom_at, oom_reported_at)
    reason = {
        "pid": pid,
        "exit_code": code,
        "signal_number": number,
        "seconds": facts.seconds,
        "peak_bytes": facts.peak_bytes,
        "limit_bytes": limit_bytes,
        "evidence": facts.evidence if is_oom or not facts.is_oom else None,
    }
    if is_oom:
        return ExitReason(ExitKind.OOM_KILLED, detector=facts.detector, **reason)  # type: ignore[arg-type]
    if stopped_by_us:
        kind = ExitKind.STOPPED
    elif number is not None:
        kind = ExitKind.SIGNALED
    else:
        kind = ExitKind.LOST if code is None else ExitKind.EXITED
    return ExitReason(kind, **reason)  # type: ignore[arg-type]


def _is_its_own(oom_at: float | None, reported_at: float | None) -> bool:
    """Whether the kill that an engine tells of is another than those that the server reported."""
    return reported_at is None or (oom_at is not None and oom_at > reported_at + SAME_SECONDS)


def _code_and_signal(exit_code: int | None) -> tuple[int | None, int | None]:
    if exit_code is not None and _SIGNALED < exit_code <= _SIGNALED + _LAST_SIGNAL:
        return None, exit_code - _SIGNALED
    return exit_code, None
