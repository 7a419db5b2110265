# SPDX-License-Identifier: Apache-2.0
"""`memory`: what one session holds after a reset and a step. `leaks`: what many leave behind.

    an extra tenth, to warm up ─▶ ten batches ─▶ measured after each, with no session open
                                     │ memory has grown?
                                     └──▶ as many again: by then, caches have filled, and Python
                                          has collected its garbage. Memory is measured once the
                                          server has returned the freed memory that it had kept
                                          for the next sessions (`env_host.sessions`)

What grows from the first batch to the last is a leak; what goes up and down is not.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from typing import Any

from ....env_host.sessions.session import POLL_INTERVAL_SECONDS
from ....system.text.units import MB, plural
from .subject import CheckResult, Finding, Holdings, SessionFailed, Subject

MAX_AT_ONCE = 32  # sessions that are held
LARGE_BYTES = 256 * MB  # of one session: a machine holds some dozens of them, not thousands

BATCHES = 10
LATE_POLLS = 5  # memory samples in the second round of sessions
GIVE_BACK_SECONDS = POLL_INTERVAL_SECONDS + 1
MIN_BYTES = 2_000_000  # growth over all sessions; less may come from the allocator
RISING_SHARE = 0.6  # of the steps between batches
PER_SESSIONS = 20  # a leak: one item left behind per this many sessions
_COUNTED = {
    "descriptors": (
        "file descriptors stay open",
        "the server ends with `Too many open files` when its limit is reached (ulimit -n)",
        "close files, sockets and pipes in the environment's close(), or open them with `with`",
    ),
    "threads": (
        "threads stay",
        "each holds memory and a place in the scheduler, until no thread can be started",
        "stop and join them in the environment's close(), or have one pool for all sessions",
    ),
    "tasks": (
        "asyncio tasks stay",
        "each holds its session's environment in memory, and the loop has ever more to do",
        "cancel and await them in the environment's close()",
    ),
    "processes": (
        "processes stay",
        "each holds memory, and the process table or the cgroup's pids.max fills up",
        "terminate and wait() for them in the environment's close()",
    ),
}


async def check_memory(subject: Subject, result: CheckResult) -> None:
    """Compare the server with sessions held open and without any."""
    count = min(MAX_AT_ONCE, subject.max_sessions)
    before = await subject.settled()
    async with AsyncExitStack() as stack:
        for opened in range(count):
            session = await stack.enter_async_context(subject.session())
            player = subject.actions.player(opened)
            await session.reset(seed=opened)
            await session.step(player())
            subject.tell(f"{opened + 1} of {plural(count, 'session')} held", opened + 1, count)
        held = await asyncio.to_thread(subject.holdings)
    each = max(0, held.memory_bytes - before.memory_bytes) // count
    result.figures = {
        "sessions": count,
        "bytes_per_session": each,
        "bytes_without_sessions": before.memory_bytes,
    }
    result.summary = (
        f"{size(each)} a session, {size(before.memory_bytes)} without any "
        f"({plural(count, 'session')} held)"
    )
    if each > LARGE_BYTES:
        result.findings.append(
            Finding(
                f"each session holds {size(each)}",
                "a machine has memory for few sessions, and a burst of them uses it up",
                "load what sessions only read (a model, a data set) once, when the module is "
                "imported: all sessions share that memory",
                is_failure=False,
            )
        )


async def check(subject: Subject, result: CheckResult) -> None:
    """Play sessions in batches, and look at the server's processes between them."""
    batch = max(1, subject.plan.sessions // BATCHES)
    run = _Sessions(subject, total=batch * (BATCHES + 1))
    await run.play(batch)
    samples = [await subject.settled()]
    for _ in range(BATCHES):
        await run.play(batch)
        samples.append(await subject.settled())
    memory = [held.memory_bytes for held in samples]
    per_session = growth(memory, batch)
    if per_session is not None:
        run.total += batch * BATCHES
        memory, late_batch = [], batch * BATCHES // LATE_POLLS
        for number in range(LATE_POLLS + 1):
            if number:
                await run.play(late_batch)
            await asyncio.sleep(GIVE_BACK_SECONDS)  # for freed memory
            memory.append((await subject.settled()).memory_bytes)
        per_session = growth(memory, late_batch)
        result.figures["memory_bytes_given_back"] = memory
    result.findings += findings(samples, batch, per_session)
    result.figures |= {
        "sessions": run.played,
        "sessions_between_samples": batch,
        "bytes_per_session": None if per_session is None else round(per_session),
        **{each.name: [getattr(held, each.name) for held in samples] for each in fields(Holdings)},
    }
    seen = size(max(MIN_BYTES, largest_fall(memory)) / (batch * BATCHES))
    result.summary = (
        f"no leak in {run.played:,} sessions; a memory leak below {seen} a session would go unseen"
    )
    if result.findings:
        result.summary = f"{run.played:,} sessions left something behind"


def growth(values: Sequence[float], sessions_between: int) -> float | None:
    """Return by how much a value grows with each session; None if it does not.

    The growth is the median of all slopes (Theil and Sen), which single outliers do not change, or
    that of the second half if it is less: what has stopped growing was a cache. Most single steps
    must go up. The minimum of the second half must also exceed that of the first half by at least
    a quarter of the whole growth at that slope: a codec's memory, in which the allocator leaves
    holes, grows for a thousand sessions and falls back, with no byte lost.
    """
    whole, late = _slope(values), _slope(values[len(values) // 2 :])
    slope = min(whole, late)
    rising = sum(b > a for a, b in itertools.pairwise(values)) / max(1, len(values) - 1)
    is_much = slope * (len(values) - 1) >= MIN_BYTES
    half = len(values) // 2
    stays = min(values[half:]) - min(values[:half]) >= slope * half / 2
    is_leak = is_much and rising >= RISING_SHARE and stays
    return slope / sessions_between if is_leak else None


def largest_fall(values: Sequence[float]) -> float:
    """Return the largest fall of a value: growth smaller than that cannot be detected."""
    highest = itertools.accumulate(values, max)
    return max(before - value for before, value in zip(highest, values, strict=True))


def left_over(counts: Sequence[int], sessions_between: int) -> float:
    """Return how many items each session leaves behind; 0 if their number goes down again."""
    half = len(counts) // 2
    if min(counts[half:]) <= max(counts[:half]):
        return 0.0
    each = _slope(counts) / sessions_between
    return each if each * PER_SESSIONS >= 1 else 0.0


def findings(
    samples: Sequence[Holdings], batch: int, bytes_per_session: float | None
) -> list[Finding]:
    """Decide what is a leak."""
    found = []
    if bytes_per_session is not None:
        found.append(
            Finding(
                f"memory grows by {size(bytes_per_session)} with each session, and did not stop",
                f"{size(bytes_per_session * 10_000)} after 10,000 sessions: in the end, the server "
                "is killed for lack of memory, with all its sessions",
                "look for what outlives its session: lists and dictionaries of the module or the "
                "class, caches without a bound (functools.cache on methods), callbacks that are "
                "never removed; tracemalloc in close() says where it was allocated",
            )
        )
    for name, (what, means, remedy) in _COUNTED.items():
        counts = [getattr(held, name) for held in samples]
        if None in counts:
            continue
        if each := left_over(counts, batch):
            sentence = f"{what}: {each:.2g} per session ({counts[0]} before, {counts[-1]} now)"
            found.append(Finding(sentence, means, remedy))
    return found


def size(count: float) -> str:
    """Write a number of bytes for people."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    if abs(count) < 1000_000:
        return f"{count / 1000:.1f} kB"
    return f"{count / MB:.1f} MB"


def _slope(values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of values; a slope is the change per step."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median([(b - a) / (j - i) for (i, a), (j, b) in pairs] or [0.0])


@dataclass(slots=True)
class _Sessions:
    """Plays sessions, several at once."""

    subject: Subject
    total: int
    played: int = 0

    async def play(self, count: int) -> None:
        """Play some sessions."""
        numbers = iter(range(self.played, self.played + count))
        at_once = max(1, min(count, self.subject.plan.concurrency, self.subject.max_sessions))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._one_after_another(numbers))
        except* SessionFailed as failed:
            first = failed.exceptions[0]
            raise SessionFailed(f"after {self.played:,} sessions: {first}") from first

    async def _one_after_another(self, numbers: Any) -> None:
        plan = self.subject.plan
        for number in numbers:
            player = self.subject.actions.player(number)
            async with self.subject.session() as session:
                frame = await session.reset(seed=number)
                for _ in range(plan.steps):
                    if frame.data.get("done"):
                        break
                    frame = await session.step(player())
            self.played += 1
            sentence = f"{self.played:,} of {self.total:,} sessions"
            self.subject.tell(sentence, self.played, self.total)
