# SPDX-License-Identifier: Apache-2.0
"""`blocking`: steps that keep the event loop from everything else.

    this session    ├──────────── step ────────────┤
    /health         ├──┤ answered meanwhile: good    ├──┤ only after the step: it held the loop

The two durations are compared with each other, not with a fixed one, because a busy machine makes
both longer. An overloaded machine may make both too long, so the check is repeated after a finding,
and reports it only if it is found again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from ....environments.access import ask
from ....schema.errors import NotAnswering
from .subject import ASK_SECONDS, CheckResult, Finding, Subject

CALLS = 20
HEAD_START_SECONDS = 0.01  # of the step
LONG_SECONDS = 0.05  # shorter calls hold others up for less than a client notices
BLOCKED_SHARE = 0.8  # of what was left of the call, when the question was asked
MIN_BLOCKED = 2  # a single one may be due to the machine


@dataclass(frozen=True, slots=True)
class Call:
    """One call, and the question that was asked while it ran."""

    what: str
    seconds: float
    question_seconds: float

    @property
    def is_blocked(self) -> bool:
        """Return whether the question was answered only when the call had ended."""
        left = self.seconds - HEAD_START_SECONDS
        return self.seconds >= LONG_SECONDS and self.question_seconds >= BLOCKED_SHARE * left


async def check(subject: Subject, result: CheckResult) -> None:
    """Call, and ask for /health meanwhile."""
    calls = await _play(subject)
    if judge(calls) is not None:
        calls = await _play(subject)
    found = judge(calls)
    longest = max(call.seconds for call in calls)
    result.figures = {
        "calls": len(calls),
        "longest_seconds": longest,
        "longest_answer_meanwhile_seconds": max(c.question_seconds for c in calls),
    }
    result.summary = f"{len(calls)} calls, the longest {longest * 1000:.0f} ms; "
    result.summary += "others are answered meanwhile"
    if found is not None:
        result.summary = "calls keep the event loop from all other sessions"
        result.findings.append(found)


async def _play(subject: Subject) -> list[Call]:
    """Call in one session, and ask a question during each call."""
    calls: list[Call] = []
    player = subject.actions.player(subject.plan.seed)
    async with subject.session() as session:
        for number in range(CALLS):
            is_reset = number % 10 == 0
            call = asyncio.create_task(session.reset() if is_reset else session.step(player()))
            await asyncio.sleep(HEAD_START_SECONDS)
            question_seconds = 0.0 if call.done() else await asyncio.to_thread(_question, subject)
            answer = await call
            what = "reset" if is_reset else "step"
            calls.append(Call(what, answer.seconds, question_seconds))
            if answer.data.get("done"):
                await session.reset()
            subject.tell(f"{number + 1} of {CALLS} calls", number + 1, CALLS)
    return calls


def judge(calls: list[Call]) -> Finding | None:
    """Decide whether calls block the loop."""
    blocked = [call for call in calls if call.is_blocked]
    if len(blocked) < min(MIN_BLOCKED, len(calls)):
        return None
    worst = max(blocked, key=lambda call: call.seconds)
    return Finding(
        f"{len(blocked)} of {len(calls)} calls blocked the event loop, a {worst.what} for "
        f"{worst.seconds * 1000:.0f} ms",
        "while one session is in such a call, no other session of the process is answered: "
        "64 sessions take 64 times as long as one",
        "await what takes long (asyncio.sleep, an asynchronous client, asyncio.to_thread), or "
        "write reset and step as plain functions, which run on threads; C code must release the "
        "GIL, or the environment be launched with --isolate",
    )


def _question(subject: Subject) -> float:
    started = time.monotonic()
    with contextlib.suppress(NotAnswering):  # `protocol` reports it
        ask(subject.base_url, "/health", ASK_SECONDS)
    return time.monotonic() - started
