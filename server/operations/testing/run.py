# SPDX-License-Identifier: Apache-2.0
"""The agenda of a test: one check after another, against one running replica.

a check raises SessionFailed     a finding of it, with how the server's process exited, if it did
a process exited, unnoticed      a finding of the check that ran
a process was killed for memory  only that finding: the check's measurements are of no use
the next check                   runs anyway: the shim has started the server again
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection

from ....system.process.exit_reason import ExitReason
from ....system.text.json_lines import Json
from ....system.text.units import MB, plural
from . import blocking, determinism, leaks, protocol
from .subject import CheckResult, Finding, Outcome, SessionFailed, Subject

Check = Callable[[Subject, CheckResult], Awaitable[None]]

# In this order: the memory of a session can only be measured while there were few sessions.
CHECKS: dict[str, Check] = {
    "protocol": protocol.check,
    "memory": leaks.check_memory,
    "blocking": blocking.check,
    "determinism": determinism.check,
    "processes": determinism.check_processes,
    "branching": determinism.check_branching,
    "leaks": leaks.check,
}
MEASURING = ("memory", "blocking", "leaks")
COME_BACK_SECONDS = 15.0  # for a server that has exited to be ready again
POLL_INTERVAL_SECONDS = 0.2


async def run(
    subject: Subject, skipped: Collection[str], on_result: Callable[[CheckResult], None]
) -> Json:
    """Run the checks; returns the report."""
    results = []
    for name, check in CHECKS.items():
        result = CheckResult(name, was_skipped=name in skipped)
        if result.was_skipped:
            result.summary = "not tested, as asked for"
        else:
            await _run_one(check, subject, result)
        results.append(result)
        on_result(result)
    return {
        "name": subject.name,
        "passed": all(result.outcome is not Outcome.FAILED for result in results),
        "actions": subject.actions.origin,
        "checks": [result.to_json() for result in results],
    }


async def _run_one(check: Check, subject: Subject, result: CheckResult) -> None:
    started, exits, seen = time.monotonic(), subject.exits(), subject.answers
    seen.clear()
    lost: Finding | None = None
    try:
        await check(subject, result)
        failing = [c for c in ("reset", "step") if seen[c, "error"] and not seen[c, "observation"]]
        if failing and result.check != "protocol":
            result.was_skipped, result.findings = True, []  # errors were compared with errors
            result.summary = f"not tested: no {failing[0]} succeeded"
    except SessionFailed as exc:
        result.summary = "it could not be finished"
        lost = Finding(
            str(exc),
            "training code's sessions end in the same way",
            exc.remedy or f"{protocol.LOG}; --step-timeout allows longer calls",
        )
    # The shim hears of an exit a moment after the clients.
    await asyncio.sleep(POLL_INTERVAL_SECONDS)
    if exits != (now := subject.exits()):
        servers, shards = (after - before for before, after in zip(exits, now, strict=True))
        last, shares_limit = subject.last_exit(of_shard=not servers)
        if note_exits(result, servers + shards, last, shares_limit=shares_limit):
            lost = None
        for _ in range(round(COME_BACK_SECONDS / POLL_INTERVAL_SECONDS)):
            if subject.status().get("state") == "ready":
                break
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
    if lost is not None:
        result.findings.append(lost)
    result.seconds = time.monotonic() - started


def note_exits(
    result: CheckResult, count: int, last: ExitReason | None, *, shares_limit: bool
) -> bool:
    """Add the finding that processes of the server exited during a check.

    If the last one was killed for memory, this replaces what the check has measured, because the
    figures are of a server that has just started. Findings about the protocol stay. Returns whether
    it was killed for memory, which explains why the check could not be finished.
    """
    how = f"it {last.sentence(shares_limit=shares_limit)}" if last else "it is not known how"
    found, means = (
        f"{plural(count, 'process', 'es')} of the server exited: {how}",
        "all sessions of the process ended with it",
    )
    if last is None or not last.is_oom:
        remedy = "its log has the last lines that it printed"
        result.findings.append(Finding(found, means, remedy))
        return False
    had = last.limit_bytes or last.peak_bytes
    more = "" if had is None else f" {math.ceil(2 * had / MB)}M"
    remedy = f"more memory: openenv test with --memory{more}, and openenv launch in the same way"
    if result.check == "leaks":
        remedy = f"it may leak: see with fewer --sessions whether memory grows; if not, {remedy}"
    result.summary = "it could not be finished: the server was killed for memory"
    kept = [] if result.check in MEASURING else result.findings
    result.findings = [Finding(found, means, remedy), *kept]
    result.figures = {}
    return True
