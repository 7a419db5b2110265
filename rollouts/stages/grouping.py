# SPDX-License-Identifier: Apache-2.0
"""A sink in front of a sink: episodes wait for their group, and go on with what the stages found.

    collector ─ put_step ─────────────────────────────▶ writer (steps lie in its spool meanwhile)
              ─ finish ─▶ group ─ complete ─▶ filters, advantages ─ finish(verdict) ─▶ writer

Only the summaries of episodes wait here, a few hundred bytes each. The stages run in one thread of
their own, one group at a time: they may take as long as they like, and the loop goes on.
What waits for its group when a rollout is interrupted is collected again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ..episodes import Episode, Room, Step, StepSink
from ..errors import StageError
from ..layout import Verdict
from .advantages import Advantages, group_normalised
from .filters import Filter, Finished, sift


class VerdictSink(StepSink, Protocol):
    """A sink that writes down what the stages found (`RolloutWriter`)."""

    async def finish(self, episode: Episode, verdict: Verdict = ...) -> None:
        """The episode has ended, and this was found of it."""
        ...


def by_number(size: int) -> Callable[[Episode], Hashable]:
    """Episodes 0 to size-1 are a group, and so on."""
    return lambda episode: int(episode.id) // size


class GroupSink:
    """Takes episodes (a `StepSink`), in groups of `size`, and hands them on with their verdicts."""

    def __init__(
        self,
        sink: VerdictSink,
        size: int,
        *,
        group_of: Callable[[Episode], Hashable] | None = None,
        filters: Mapping[str, Filter] | None = None,
        advantages: Advantages = group_normalised,
    ) -> None:
        if size < 1:
            raise ValueError(f"a group has at least one episode, not {size}")
        self._sink = sink
        self._size = size
        self._group_of = group_of or by_number(size)
        self._filters = dict(filters or {})
        self._advantages = advantages
        self._steps: Counter[str] = Counter()
        self._waiting: dict[Hashable, list[Finished]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-stages")

    async def reserve(self, size_bytes: int) -> Room:
        """As the sink behind says."""
        return await self._sink.reserve(size_bytes)

    async def put_step(self, episode_id: str, number: int, step: Step, room: Room) -> None:
        """On to the sink behind."""
        self._steps[episode_id] += 1
        await self._sink.put_step(episode_id, number, step, room)

    async def discard(self, episode_id: str) -> None:
        """This attempt is forgotten."""
        del self._steps[episode_id]
        await self._sink.discard(episode_id)

    async def finish(self, episode: Episode) -> None:
        """Waits for nobody, but the last of a group hands all of it on.

        Raises:
            StageError: a stage failed on the group.
        """
        steps = self._steps.pop(episode.id, 0) or len(episode.steps)
        key = self._group_of(episode)
        group = self._waiting.setdefault(key, [])
        group.append(Finished(episode, steps))
        if len(group) == self._size:
            del self._waiting[key]
            await self._hand_on(group)

    async def close(self) -> None:
        """Groups that never became complete go on as they are; then the sink behind is closed."""
        try:
            while self._waiting:
                await self._hand_on(self._waiting.pop(next(iter(self._waiting))))
        finally:
            await asyncio.to_thread(self._thread.shutdown)
            await self._sink.close()

    async def _hand_on(self, group: list[Finished]) -> None:
        loop = asyncio.get_running_loop()
        verdicts = await loop.run_in_executor(self._thread, self._judge, group)
        for one in group:
            await self._sink.finish(one.episode, verdicts[one.episode.id])

    def _judge(self, group: list[Finished]) -> dict[str, Verdict]:
        try:
            return judge(group, self._filters, self._advantages)
        except Exception as exc:
            ids = ", ".join(one.episode.id for one in group)
            raise StageError(f"a stage failed on the group {ids}: {exc!r}") from exc


def judge(
    group: list[Finished], filters: Mapping[str, Filter], advantages: Advantages
) -> dict[str, Verdict]:
    """What becomes of each episode of a group, by its id. Those that are dropped do not count for
    the advantages of the others."""
    kept, dropped = sift(group, filters)
    found = advantages([one.episode.total_reward for one in kept])
    verdicts = {episode_id: Verdict(filtered=name) for episode_id, name in dropped.items()}
    for one, advantage in zip(kept, found, strict=True):
        verdicts[one.episode.id] = Verdict(advantage)
    return verdicts
