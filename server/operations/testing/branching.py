# SPDX-License-Identifier: Apache-2.0
"""`branching`: how a session is copied, and whether its copies answer as it does.

    session     reset(seed) a b c ─▶ branch ─▶ d e f      all three must answer alike
    2 branches                              └▶ d e f

Branches by replay are sessions in which a b c were repeated. If these differ, a seed does not
repeat an episode, which is a fault for `determinism`, and none of the copies.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from ....rollouts.session.branching import REPLAY, REPLAYED, branch_address
from ....system.text.json_lines import Json
from .determinism import EPISODE, differences
from .subject import CheckResult, Finding, Frame, Subject, TrialSession

BRANCHES = 2
STEPS = 5  # before the branches, and in them


async def check(subject: Subject, result: CheckResult) -> None:
    """Branch a session, and play the same actions in it and in its branches."""
    ignored = frozenset(subject.plan.ignore)
    async with AsyncExitStack() as opened:
        parent = await opened.enter_async_context(subject.session())
        await _play(subject, parent, is_begin=True)
        answer = await parent.ask({"type": "branch", "data": {"count": BRANCHES}})
        _describe(answer, result)
        if answer.kind != "branches" and (result.was_skipped or subject.max_sessions <= BRANCHES):
            return
        ids = [each["session_id"] for each in answer.data.get("branches") or ()]
        episodes = [await _branch(subject, opened, each) for each in ids or [None] * BRANCHES]
        episodes.append(await _play(subject, parent))
    differing = next((d for e in episodes for d in differences(episodes[0], e, ignored)), None)
    if differing is None:
        result.summary += "; two branches answer as their session does"
        return
    async with AsyncExitStack() as opened:
        again = [await _branch(subject, opened, None) for _ in range(2 if ids else 0)]
    if not ids or any(differences(again[0], again[1], ignored)):
        result.summary += "; their answers differ, since a seed does not repeat an episode"
        return
    step, path, values = differing
    result.summary += "; their answers differ"
    found = f"after equal actions, two copies of a session differ at step {step}: {path}: {values}"
    means = "a branch has not all of its session's state, or shares some of it"
    remedy = "keep state in the instance, or in what export_state() gives and import_state() takes"
    result.findings.append(Finding(found, means, remedy))


def _describe(answer: Frame, result: CheckResult) -> None:
    """Note how the session is branched, and why not in a better way."""
    refusal = answer.data
    result.figures = {"by": refusal.get("by", REPLAY), "refusal": None}
    if answer.kind == "branches":
        result.summary = f"branches by {refusal['by']}"
        return
    result.figures["refusal"] = refusal
    if refusal.get("code") not in REPLAYED:
        result.was_skipped, result.summary = True, f"no branches: {answer.error}"
        return
    why = refusal.get("reason") or "the server makes no copies"
    found = ", ".join(refusal.get("found") or ())
    result.summary = f"branches by {REPLAY} ({why}{': ' if found else ''}{found})"


async def _branch(subject: Subject, opened: AsyncExitStack, session_id: str | None) -> list[Json]:
    """Attach to a branch, or replay one; return its answers to the actions that follow."""
    address = subject.base_url
    if session_id is not None:
        address = branch_address(address, session_id)
    session = TrialSession(address, subject.plan.step_timeout_seconds)
    await opened.enter_async_context(session)
    if session_id is None:
        await _play(subject, session, is_begin=True)
    return await _play(subject, session)


async def _play(subject: Subject, session: TrialSession, *, is_begin: bool = False) -> list[Json]:
    """Play the beginning of an episode, or go on; return the answers."""
    player = subject.actions.player(f"{subject.plan.seed} {is_begin}")
    if is_begin:
        frames = [await session.reset(seed=subject.plan.seed, episode_id=EPISODE)]
    else:
        frames = [await session.state()]
    for _ in range(STEPS):
        if frames[-1].data.get("done"):
            break
        frames.append(await session.step(player()))
    return [frame.data for frame in frames]
