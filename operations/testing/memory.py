# SPDX-License-Identifier: Apache-2.0
"""`memory`: how much memory a session holds, once it was reset and has taken a step."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from ...system.units import MB
from .report import CheckResult, Finding
from .subject import Subject

MOST_AT_ONCE = 32
LARGE_BYTES = 256 * MB  # of one session: a machine holds some dozens of them, not thousands


async def check(subject: Subject, result: CheckResult) -> None:
    """Hold sessions, and compare with none."""
    count = min(MOST_AT_ONCE, subject.max_sessions)
    before = await subject.settled()
    async with AsyncExitStack() as stack:
        for opened in range(count):
            session = await stack.enter_async_context(subject.session())
            player = subject.actions.player(opened)
            await session.reset(seed=opened)
            await session.step(player.next())
            subject.tell(f"{opened + 1} of {count} sessions are held", opened + 1, count)
        held = await asyncio.to_thread(subject.holdings)
    each = max(0, held.memory_bytes - before.memory_bytes) // count
    result.figures = {
        "sessions": count,
        "bytes_per_session": each,
        "bytes_without_sessions": before.memory_bytes,
        "threads_per_session": round((held.threads - before.threads) / count, 2),
        "descriptors_per_session": round((held.descriptors - before.descriptors) / count, 2),
    }
    result.summary = (
        f"{size(each)} a session, {size(before.memory_bytes)} without any "
        f"({'one session' if count == 1 else f'{count} sessions'} held)"
    )
    if each > LARGE_BYTES:
        result.findings.append(
            Finding(
                f"each session holds {size(each)}",
                "a machine has memory for few sessions, and a burst of them ends it",
                "load what sessions only read (a model, a data set) once, when the module is "
                "imported: all sessions share that memory",
                is_failure=False,
            )
        )


def size(count: float) -> str:
    """Write a number of bytes for people."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    if abs(count) < 1000_000:
        return f"{count / 1000:.1f} kB"
    return f"{count / MB:.1f} MB"
