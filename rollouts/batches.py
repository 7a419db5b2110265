# SPDX-License-Identifier: Apache-2.0
"""Whole episodes in memory, handed over in batches.

    put_step ─▶ steps of what runs ─finish─▶ finished, at most `limit_bytes` ─▶ `next` ─▶ a batch

Memory holds running episodes (see `buffers.py`), finished ones that wait to be taken, and
the batch that is being built. Once the second is full, `finish` waits, and no episode begins.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from .buffers import ByteBudget, Hold
from .episodes import Episode, Step


class BatchSink:
    """A `StepSink` that hands whole episodes over."""

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ByteBudget(limit_bytes)
        self._running: dict[str, list[Step]] = {}
        self._finished: asyncio.Queue[tuple[Episode, Hold] | None] = asyncio.Queue()

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Keeps the step until the episode is handed over."""
        self._running.setdefault(episode_id, []).append(step)

    async def finish(self, episode: Episode) -> None:
        """Returns when there is room for it."""
        steps = tuple(self._running.pop(episode.id, ()))
        whole = replace(episode, steps=steps)
        hold = await self._budget.reserve(whole.size_bytes)
        self._finished.put_nowait((whole, hold))

    async def discard(self, episode_id: str) -> None:
        """Forget the attempt."""
        self._running.pop(episode_id, None)

    async def close(self) -> None:
        """No more will come."""
        self._finished.put_nowait(None)

    async def next(self) -> Episode | None:
        """The next that has finished; None when there will be none."""
        found = await self._finished.get()
        if found is None:
            self._finished.put_nowait(None)  # the next time, too
            return None
        episode, hold = found
        hold.release()
        return episode
