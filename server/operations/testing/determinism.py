# SPDX-License-Identifier: Apache-2.0
"""`determinism`: a seed repeats an episode. `processes`: the serving process changes nothing.

    session 1   reset(seed) a b c …    reset(seed) a b c …     the same again in one session
    session 2   reset(seed) a b c …                            and in another one

The same seed and the same actions must give the same observations, rewards and ends. A further
episode with another seed tells whether the seed changes anything. Where all sessions share one
state, a difference is a warning.

A launch serves sessions in several processes, and the test in one. The server found in the
project's code what that may change (`env_host/environment/source_analysis.py`), and has notes on
hooks and middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from ....system.text.json_lines import Json
from ....system.text.units import plural
from .subject import CheckResult, Finding, Subject, TrialSession

STEPS = 20
EPISODE = "openenv-test"  # the id of each episode, so that what is derived from it is the same
TABLE = "docs/compatibility.md, Differences on purpose"
MAX_SHOWN = 3
MAX_CHARACTERS = 60  # of a value


async def check(subject: Subject, result: CheckResult) -> None:
    """Play one seed three times, and another one."""
    seed = subject.plan.seed
    async with subject.session() as session:
        first = await _episode(subject, session, seed)
        again = await _episode(subject, session, seed)
    async with subject.session() as session:
        elsewhere = await _episode(subject, session, seed)
        other = await _episode(subject, session, seed + 1)
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


async def _episode(subject: Subject, session: TrialSession, seed: int) -> list[Json]:
    player = subject.actions.player(subject.plan.seed)
    frames = [(await session.reset(seed=seed, episode_id=EPISODE)).data]
    for _ in range(STEPS):
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
