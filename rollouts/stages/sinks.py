# SPDX-License-Identifier: Apache-2.0
"""Sinks before the writer: groups with filters and advantages, and failed episodes.

In a `GroupSink` episodes wait for their group, of which all of a tree count as one:

    collector ─ put_step ─────────────────────────────▶ writer (its files have the steps meanwhile)
              ─ finish ─▶ group ─ complete ─▶ filters, advantages ─ finish_together ─▶ writer
              ─ finish, failed ─▶ the group is dropped: none of it is written

Only the summaries of episodes wait here, a few hundred bytes each: a large last observation is
written behind the steps while the episode waits, and read again for the stages. The stages run in
one thread of their own, one group at a time, so that slow ones do not block the loop.

Even after a crash, a group exists as a whole or not at all. When a rollout is interrupted, waiting
episodes are collected again; so is a group of which an episode failed.

Advantages map the rewards of a group to as many numbers; the advantage of a single episode is 0. A
filter maps a group to one answer for each episode: True drops it, and it is recorded without its
steps, so that it is not played again. A later filter gets the episodes that the earlier ones kept.

Without `--group` each episode is a group.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from ..episodes import Episode, EpisodeStatus, FailureReason, ProgressStats, Step, number_of
from ..errors import AllFailed, StageError
from ..folder.rows import Verdict
from ..folder.writer import RolloutWriter

MIN_DEVIATION = 1e-6  # added to the deviation, so that equal rewards do not divide by zero

Advantages = Callable[[Sequence[float]], list[float]]


def centred(rewards: Sequence[float]) -> list[float]:
    """Subtract the group's mean from each reward (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    mean = _mean(rewards)
    return [reward - mean for reward in rewards]


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """Count standard deviations from the group's mean (GRPO, https://arxiv.org/abs/2402.03300)."""
    differences = centred(rewards)
    deviation = math.sqrt(_mean([difference**2 for difference in differences]))
    return [difference / (deviation + MIN_DEVIATION) for difference in differences]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Subtract the mean of the *other* episodes (RLOO, https://arxiv.org/abs/2402.14740)."""
    others = len(rewards) - 1
    if others < 1:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / others for reward in rewards]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode of a group. `steps` is their number; the steps may be on disk."""

    episode: Episode
    steps: int
    read_last: Callable[[], bytes] | None = None  # a large last observation, while it waits

    def whole(self) -> Self:
        """Return the episode with its last observation, which is read from a file."""
        if self.read_last is None:
            return self
        return replace(self, episode=replace(self.episode, final_observation_json=self.read_last()))


Filter = Callable[[Sequence[Finished]], Sequence[bool]]


def by_length(least: int = 0, most: float = math.inf) -> Filter:
    """Drop episodes with fewer or more steps; both bounds are inclusive."""
    return lambda group: [not least <= one.steps <= most for one in group]


def by_reward(least: float = -math.inf, most: float = math.inf) -> Filter:
    """Drop episodes whose total reward is outside the bounds, which are inclusive."""
    return lambda group: [not least <= one.episode.total_reward <= most for one in group]


def failed(group: Sequence[Finished]) -> list[bool]:
    """Drop failed episodes."""
    return [one.episode.status is EpisodeStatus.FAILED for one in group]


def without_signal(group: Sequence[Finished]) -> list[bool]:
    """Drop a whole group with equal rewards, because all of its advantages are 0."""
    same = len({one.episode.total_reward for one in group}) <= 1
    return [same] * len(group)


MIN_PENDING_BYTES = 4096  # a smaller last observation waits in memory
HOPELESS_EPISODES = 16  # failures without a success that end the rollout
MAX_TRACEBACKS = 20  # in the log

Say = Callable[[str], None]


class GroupSink:
    """A `StepSink` that passes episodes on in groups of `size`, with their verdicts.

    It logs failed episodes, and drops their groups unless they are kept.
    """

    def __init__(
        self,
        writer: RolloutWriter,
        size: int,
        *,
        filters: Mapping[str, Filter] | None = None,
        advantages: Advantages | None = group_normalised,
        counts: ProgressStats | None = None,
        say: Say = lambda _: None,
        hints: Mapping[FailureReason, str] | None = None,
        keeps_failed: bool = True,
    ) -> None:
        """Make a sink in front of a writer.

        Args:
            writer: Stores steps and groups.
            size: Episodes of a group, at least 1: those from 0 to size - 1, and so on.
            filters: The filters in order, by the name that is recorded for a dropped episode.
            advantages: Computes advantages from a group's rewards; None: only filter.
            counts: Counts that are updated as groups are written.
            say: Called with each line for the log.
            hints: By the reason of the last failure, the hint if all episodes fail.
            keeps_failed: Whether failed episodes are written.
        """
        if size < 1:
            raise ValueError(f"a group has at least one episode, not {size}")
        self.counts = counts or ProgressStats()
        self._writer = writer
        self._size = size
        self._filters = dict(filters or {})
        self._advantages = advantages
        self._steps: Counter[str] = Counter()
        self._waiting: dict[int, list[Finished]] = {}
        self._given_up: set[int] = set()
        self._say = say
        self._hints = hints or {}
        self._logged: set[str] = set()  # tracebacks of the policy, without the errors' texts
        self._keeps_failed = keeps_failed
        self._last_failure = ""
        self._hint: str | None = None
        self._failed = 0
        self._is_well = False  # whether an episode has succeeded
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-stages")

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Pass a step to the next sink."""
        self._steps[episode_id] += 1
        await self._writer.put_step(episode_id, number, step)

    async def discard(self, episode_id: str) -> None:
        """Drop the steps of this attempt."""
        self._steps.pop(episode_id, None)
        await self._writer.discard(episode_id)

    async def finish(self, episode: Episode) -> None:
        """Add an episode to its group, or drop the group; the last one passes the group on.

        Raises:
            StageError: A stage failed on the group.
            AllFailed: The first `HOPELESS_EPISODES` episodes have failed.
        """
        if (failure := episode.failure) is None:
            self._is_well = True
            await self._add(episode)
            return
        self._failed += 1
        self._last_failure = f"{failure.reason}: {failure.message}"
        self._hint = self._hints.get(failure.reason)
        self.counts.last_failures[failure.reason.value] = failure.message
        at = f" at step {failure.step}" if failure.step else ""
        self._say(f"episode {episode.id} failed{at}: {self._last_failure}")
        frames = failure.traceback.rstrip().rpartition("\n")[0]
        if frames and frames not in self._logged and len(self._logged) < MAX_TRACEBACKS:
            self._logged.add(frames)
            self._say(failure.traceback.rstrip())
        if self._keeps_failed:
            await self._add(episode)
        else:
            await self._leave_out(episode)
        if self._failed == HOPELESS_EPISODES and not self._is_well:
            text = f"the first {self._failed} episodes failed; the last: {self._last_failure}"
            raise AllFailed(text, self._hint)

    async def _add(self, episode: Episode) -> None:
        key = number_of(episode.id) // self._size
        steps = self._steps.pop(episode.id, 0) or len(episode.steps)
        one = Finished(episode, steps + (episode.branched_at or 0))
        waiting = [one, *self._waiting.get(key, ())]
        # The episode that began a tree is the last of the tree.
        is_last = sum(each.episode.parent is None for each in waiting) >= self._size
        text = episode.final_observation_json
        if len(text) >= MIN_PENDING_BYTES and not is_last and key not in self._given_up:
            read = await self._writer.keep_observation(episode.id, text)
            one = Finished(replace(episode, final_observation_json=b"null"), one.steps, read)
        if key in self._given_up:  # dropped meanwhile
            self.counts.left_out += 1
            await self.discard(episode.id)
            return
        group = self._waiting.setdefault(key, [])
        group.append(one)
        if is_last:
            del self._waiting[key]
            await self._hand_on(group)

    async def _leave_out(self, episode: Episode) -> None:
        key = number_of(episode.id) // self._size
        self._given_up.add(key)
        await self.discard(episode.id)
        for one in self._waiting.pop(key, []):
            self.counts.left_out += 1
            await self.discard(one.episode.id)

    async def close(self) -> None:
        """Pass incomplete groups on as they are, and close the writer."""
        try:
            while self._waiting:
                await self._hand_on(self._waiting.pop(next(iter(self._waiting))))
        finally:
            await asyncio.to_thread(self.stop)
            await self._writer.close()

    def stop(self) -> None:
        """End the thread of the stages; episodes that wait for their group are dropped."""
        self._thread.shutdown()

    def raise_if_all_failed(self, earlier: int) -> None:
        """Raise if the rollout has no result."""
        finished = self.counts.finished
        played, failed = finished.total(), finished[EpisodeStatus.FAILED]
        if not failed or earlier:
            return
        if failed == played:
            which = "the only episode" if played == 1 else f"all {played} episodes"
            raise AllFailed(f"{which} failed; the last with {self._last_failure}", self._hint)
        if not self.counts.written:
            which = f"{failed} of {played} episodes failed, at least one of each group"
            raise AllFailed(f"{which}; the last with {self._last_failure}", self._hint)

    async def _hand_on(self, group: list[Finished]) -> None:
        if self._filters or self._advantages or self._size > 1:
            loop = asyncio.get_running_loop()
            judged = await loop.run_in_executor(self._thread, self._judge, group)
        else:
            judged = [(one.episode, Verdict()) for one in group]
        await self._writer.finish_together(judged)
        self.counts.written += sum(episode.parent is None for episode, _ in judged)
        self.counts.filtered.update(v.filtered for _, v in judged if v.filtered is not None)

    def _judge(self, group: list[Finished]) -> list[tuple[Episode, Verdict]]:
        group = sorted(group, key=lambda one: one.episode.id)
        try:
            verdicts = judge([one.whole() for one in group], self._filters, self._advantages)
        except Exception as exc:
            ids = ", ".join(one.episode.id for one in group)
            raise StageError(f"a stage failed on the group {ids}: {exc!r}") from exc
        return [(one.episode, verdicts[one.episode.id]) for one in group]


def judge(
    group: Sequence[Finished], filters: Mapping[str, Filter], advantages: Advantages | None
) -> dict[str, Verdict]:
    """Return the verdict on each episode of a group, by its id.

    Kept episodes have an advantage, unless their reward is not a number.

    Raises `ValueError`: a stage gave too few answers, too many, or one that is not a finite number.
    """
    kept, verdicts = list(group), {one.episode.id: Verdict() for one in group}
    for name, drops in filters.items():
        said = list(drops(kept))
        if len(said) != len(kept):
            raise ValueError(f"the filter {name} gave {len(said)} answers for {len(kept)} episodes")
        dropped = {one.episode.id for one, drop in zip(kept, said, strict=True) if drop}
        verdicts |= dict.fromkeys(dropped, Verdict(filtered=name))
        kept = [one for one in kept if one.episode.id not in dropped]
    if advantages is None:
        return verdicts
    compared = [one for one in kept if math.isfinite(one.episode.total_reward)]
    found = [float(a) for a in advantages([one.episode.total_reward for one in compared])]
    if len(found) != len(compared):
        raise ValueError(f"there are {len(found)} advantages for {len(compared)} episodes")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"advantages are numbers, not {found}")
    for one, advantage in zip(compared, found, strict=True):
        verdicts[one.episode.id] = Verdict(advantage)
    return verdicts
