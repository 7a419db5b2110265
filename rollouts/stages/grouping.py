# SPDX-License-Identifier: Apache-2.0
"""A sink in front of a sink: episodes wait for their group, and leave with the stages' verdicts.

    collector ─ put_step ─────────────────────────────▶ writer (steps lie in its files meanwhile)
              ─ finish ─▶ group ─ complete ─▶ filters, advantages ─ finish_together ─▶ writer
              ─ leave_out ─▶ the group is given up: none of it is written

Only the summaries of episodes wait here, a few hundred bytes each: what an episode saw last is
written behind its steps while it waits, when it is large, and read again for the stages. These run
in one thread of their own, one group at a time: they may take as long as they like, and the loop
goes on.

A group is written whole or not at all, whatever crashes. What waits for its group when a rollout is
interrupted is collected again, and so is a group of which an episode failed.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ..episodes import Episode, Step
from ..errors import StageError
from ..folder.rows import Verdict
from ..folder.writer import RolloutWriter
from ..progress_stats import EpisodeCounts
from .advantages import Advantages, group_normalised
from .filters import Filter, Finished, sift

LEAST_PENDING_BYTES = 4096  # a smaller last observation waits in memory


class GroupSink:
    """Takes episodes (a `StepSink`), in groups of `size`, and hands them on with their verdicts."""

    def __init__(
        self,
        writer: RolloutWriter,
        size: int,
        *,
        filters: Mapping[str, Filter] | None = None,
        advantages: Advantages | None = group_normalised,
        counts: EpisodeCounts | None = None,
    ) -> None:
        """Makes a sink in front of another.

        Args:
            writer: Stores steps and groups.
            size: Episodes of a group: those from 0 to size - 1, and so on.
            filters: Applied in order, by the name that is written for a dropped episode.
            advantages: From the rewards of a group; None filters only.
            counts: Updated as groups are written.

        Raises:
            ValueError: `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"a group has at least one episode, not {size}")
        self.counts = counts or EpisodeCounts()
        self._writer = writer
        self._size = size
        self._filters = dict(filters or {})
        self._advantages = advantages
        self._steps: Counter[str] = Counter()
        self._waiting: dict[int, list[_Waiting]] = {}
        self._given_up: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-stages")

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Passes a step to the sink behind."""
        self._steps[episode_id] += 1
        await self._writer.put_step(episode_id, number, step)

    async def discard(self, episode_id: str) -> None:
        """Forgets the steps of this attempt."""
        del self._steps[episode_id]
        await self._writer.discard(episode_id)

    async def finish(self, episode: Episode) -> None:
        """Adds an episode to its group; the last one passes the whole group on.

        Raises:
            StageError: a stage failed on the group.
        """
        key = int(episode.id) // self._size
        is_last = len(self._waiting.get(key, ())) + 1 >= self._size
        one = await self._made_small(episode, may_wait=not is_last and key not in self._given_up)
        if key in self._given_up:  # it may have been meanwhile
            self.counts.left_out += 1
            await self.discard(episode.id)
            return
        group = self._waiting.setdefault(key, [])
        group.append(one)
        if len(group) == self._size:
            del self._waiting[key]
            await self._hand_on(group)

    async def leave_out(self, episode: Episode) -> None:
        """Gives up the group of an episode that failed for good and is not kept."""
        key = int(episode.id) // self._size
        self._given_up.add(key)
        await self.discard(episode.id)
        for one in self._waiting.pop(key, []):
            self.counts.left_out += 1
            await self.discard(one.episode.id)

    async def close(self) -> None:
        """Passes incomplete groups on as they are, and closes the sink behind."""
        try:
            while self._waiting:
                await self._hand_on(self._waiting.pop(next(iter(self._waiting))))
        finally:
            await asyncio.to_thread(self.stop)
            await self._writer.close()

    def stop(self) -> None:
        """Ends the thread; waiting episodes are forgotten with the sink behind."""
        self._thread.shutdown()

    async def _made_small(self, episode: Episode, *, may_wait: bool) -> _Waiting:
        steps = self._steps.pop(episode.id, 0) or len(episode.steps)
        text = episode.final_observation_json
        if not may_wait or len(text) < LEAST_PENDING_BYTES:
            return _Waiting(episode, steps)
        kept = await self._writer.keep_observation(episode.id, text)
        return _Waiting(replace(episode, final_observation_json=b"null"), steps, kept)

    async def _hand_on(self, group: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        judged = await loop.run_in_executor(self._thread, self._judge, group)
        await self._writer.finish_together(judged)
        self.counts.written += len(judged)
        self.counts.filtered.update(v.filtered for _, v in judged if v.filtered is not None)

    def _judge(self, group: list[_Waiting]) -> list[tuple[Episode, Verdict]]:
        group = sorted(group, key=lambda one: one.episode.id)
        try:
            verdicts = judge([one.whole() for one in group], self._filters, self._advantages)
        except Exception as exc:
            ids = ", ".join(one.episode.id for one in group)
            raise StageError(f"a stage failed on the group {ids}: {exc!r}") from exc
        return [(one.episode, verdicts[one.episode.id]) for one in group]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An episode that waits for its group."""

    episode: Episode
    steps: int
    last: Callable[[], bytes] | None = None  # reads what it saw last, where that is large

    def whole(self) -> Finished:
        """With all it had. Reads a file."""
        if self.last is None:
            return Finished(self.episode, self.steps)
        return Finished(replace(self.episode, final_observation_json=self.last()), self.steps)


def judge(
    group: Sequence[Finished], filters: Mapping[str, Filter], advantages: Advantages | None
) -> dict[str, Verdict]:
    """Filters a group and computes the advantages of the episodes that are kept.

    Returns:
        The verdict on each episode, by its id; without an advantage where a reward is no number.

    Raises:
        ValueError: A stage gave too few answers, too many, or one that is not a finite number.
    """
    kept, dropped = sift(group, filters)
    verdicts = {episode_id: Verdict(filtered=name) for episode_id, name in dropped.items()}
    if advantages is None:
        return verdicts | {one.episode.id: Verdict() for one in kept}
    verdicts |= {one.episode.id: Verdict() for one in kept}
    compared = [one for one in kept if math.isfinite(one.episode.total_reward)]
    found = [float(a) for a in advantages([one.episode.total_reward for one in compared])]
    if len(found) != len(compared):
        raise ValueError(f"there are {len(found)} advantages for {len(compared)} episodes")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"advantages are numbers, not {found}")
    for one, advantage in zip(compared, found, strict=True):
        verdicts[one.episode.id] = Verdict(advantage)
    return verdicts
