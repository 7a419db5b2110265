# SPDX-License-Identifier: Apache-2.0
"""Whether what is played again is answered again: by a seed, in another process, by a copy.

    determinism   session 1   reset(seed) a b c …    reset(seed) a b c …     again in one session
                  session 2   reset(seed) a b c …                            and in another one

    branching     session     reset(seed) a b c ─▶ branch ─▶ d e f      all three must answer alike
                  2 branches                              └▶ d e f

The same seed and the same actions must give the same observations, rewards and ends. A further
episode with another seed tells whether the seed changes anything. Where all sessions share one
state, a difference is a warning.

Branches by replay are sessions in which a b c were repeated. If these differ, a seed does not
repeat an episode, which is a fault for `determinism`, and none of the copies.

`processes`: a launch serves sessions in several processes, and the test in one. The server found in
the project's code what that may change (`env_host/environment/source_analysis.py`), and has notes
on hooks and middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

from ....rollouts.session.branching import REPLAY, REPLAYED, branch_address
from ....system.text.json_lines import Json
from ....system.text.units import plural
from .subject import CheckResult, Finding, Frame, Subject, TrialSession

STEPS = 20
BRANCHES = 2
BRANCH_STEPS = 5  # before the branches, and in them
EPISODE = "openenv-test"  # the id of each episode, so that what is derived from it is the same
TABLE = "docs/compatibility.md, Differences on purpose"
MAX_SHOWN = 3
MAX_CHARACTERS = 60  # of a value


async def check(subject: Subject, result: CheckResult) -> None:
    """Play one seed three times, and another one."""
    seed = subject.plan.seed
    async with subject.session() as session:
        first = await _play(subject, session, seed)
        again = await _play(subject, session, seed)
    async with subject.session() as session:
        elsewhere = await _play(subject, session, seed)
        other = await _play(subject, session, seed + 1)
    ignored, steps = frozenset(subject.plan.ignore), len(first) - 1
    seed_matters = any(differences(first, other, ignored))
    result.figures = {"steps": steps, "seed_matters": seed_matters}
    effect = f"another seed gives {'another' if seed_matters else 'the same'} one"
    result.summary = f"the same seed gives the same episode of {plural(steps, 'step')}; {effect}"
    for where, episode in (("in the same session", again), ("in another session", elsewhere)):
        differing = list(differences(first, episode, ignored))
        if differing:
            result.summary = "the same seed gives different episodes"
            result.findings.append(_finding(where, differing, shared=subject.shares_state))
            return


async def check_processes(subject: Subject, result: CheckResult) -> None:
    """Warn of each difference between the processes of a launch that the server has found."""
    info = (await asyncio.to_thread(subject.status)).get("info") or {}
    means = "a launch serves sessions otherwise than OpenEnv's server"
    result.summary = "nothing seen that depends on the process that serves a session"
    for sentence in dict.fromkeys([*info.get("differences", ()), *info.get("notes", ())]):
        result.summary = "sessions may depend on the process that serves them"
        result.findings.append(Finding(sentence, means, TABLE, is_failure=False))


def _finding(where: str, differing: list[tuple[int, str, str]], *, shared: bool) -> Finding:
    step = differing[0][0]
    of_it = [(path, difference) for at, path, difference in differing if at == step]
    shown = "; ".join(f"{path}: {difference}" for path, difference in of_it[:MAX_SHOWN])
    when = "at the reset" if step == 0 else f"at step {step}"
    names = sorted({path for _, path, _ in differing})
    found = f"played again {where} with the same seed and actions, it differs {when}: {shown}"
    if shared:
        return Finding(
            found,
            "all sessions share one state, so that a seed alone does not decide what one sees",
            "where that is meant: --skip determinism",
            is_failure=False,
        )
    return Finding(
        found,
        "episodes cannot be repeated, and those of a group (GRPO) do not begin alike",
        "make all randomness from the seed that reset is given (random.Random(seed)), and keep "
        "nothing of the episode before. Where a field is to differ (a time, an id): "
        f"--ignore {' --ignore '.join(names[:MAX_SHOWN])}",
    )


async def check_branching(subject: Subject, result: CheckResult) -> None:
    """Branch a session, and play the same actions in it and in its branches."""
    ignored = frozenset(subject.plan.ignore)
    async with AsyncExitStack() as opened:
        parent = await opened.enter_async_context(subject.session())
        await _play(subject, parent, subject.plan.seed, BRANCH_STEPS)
        answer = await parent.ask({"type": "branch", "data": {"count": BRANCHES}})
        _describe(answer, result)
        if answer.kind != "branches" and (result.was_skipped or subject.max_sessions <= BRANCHES):
            return
        ids = [each["session_id"] for each in answer.data.get("branches") or ()]
        episodes = [await _branch(subject, opened, each) for each in ids or [None] * BRANCHES]
        episodes.append(await _play(subject, parent, None, BRANCH_STEPS))
    differing = next((d for e in episodes for d in differences(episodes[0], e, ignored)), None)
    if differing is None:
        result.summary += "; two branches answer as their session does"
        return
    async with AsyncExitStack() as opened:
        again = [await _branch(subject, opened, None) for _ in range(2 if ids else 0)]
    if not ids or any(differences(again[0], again[1], ignored)):
        result.summary += "; their answers differ, since a seed does not repeat an episode"
        result.was_skipped = True  # they could not be compared
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
    session = await opened.enter_async_context(subject.session(address))
    if session_id is None:
        await _play(subject, session, subject.plan.seed, BRANCH_STEPS)
    return await _play(subject, session, None, BRANCH_STEPS)


async def _play(
    subject: Subject, session: TrialSession, seed: int | None, steps: int = STEPS
) -> list[Json]:
    """Play an episode of this seed, or with None continue the present one; return the answers."""
    player = subject.actions.player(f"{subject.plan.seed} {seed is None}")
    first = session.state() if seed is None else session.reset(seed=seed, episode_id=EPISODE)
    frames = [(await first).data]
    for _ in range(steps):
        if frames[-1].get("done"):
            break
        frames.append((await session.step(player())).data)
    return frames


def differences(
    one: list[Json], other: list[Json], ignored: frozenset[str]
) -> Iterator[tuple[int, str, str]]:
    """Return at which steps and fields two episodes differ: (step, field, the values)."""
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        for path, difference in _differing(a, b, ignored, ""):
            yield step, path, difference
    if len(one) != len(other):
        yield min(len(one), len(other)), "done", f"after {len(one) - 1} or {len(other) - 1} steps"


def _differing(a: Any, b: Any, ignored: frozenset[str], path: str) -> Iterator[tuple[str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b} - ignored):
            below = f"{path}.{name}" if path else name
            if below.removeprefix("observation.") not in ignored:
                yield from _differing(a.get(name), b.get(name), ignored, below)
    elif a != b:
        yield path.removeprefix("observation."), f"{_shown(a)} and {_shown(b)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "…"
