# SPDX-License-Identifier: Apache-2.0
"""Which episodes are written: those that came to their end, and failed ones where asked for.

collector ─ finish ─▶ well ─────────────────────────▶ stages, if any ─▶ writer
                      failed ─▶ told ─▶ kept? ──────▶
                                        left out, so that the next rollout plays it again
"""

from __future__ import annotations

from collections.abc import Callable

from .episodes import Episode, EpisodeStatus, FailureReason, Step, StepSink
from .errors import AllFailed
from .progress_stats import EpisodeCounts, ProgressStats
from .stages.grouping import GroupSink

HOPELESS_EPISODES = 16  # when as many failed and none came to its end, the rest is not tried
_POLICYS = (FailureReason.POLICY_ERROR, FailureReason.POLICY_TIMED_OUT)
_LOST = (FailureReason.CONNECTION_LOST, FailureReason.NOT_CONNECTED)

Say = Callable[[str], None]


class FailedEpisodeSink:
    """A `StepSink` before the stages, or before the writer where there are none."""

    def __init__(
        self,
        inner: StepSink,
        counts: EpisodeCounts,
        say: Say,
        policy_hint: str | None = None,
        lost_hint: str | None = None,
        *,
        keeps_failed: bool,
    ) -> None:
        self._inner = inner
        self._groups = inner if isinstance(inner, GroupSink) else None
        self._counts = counts
        self._say = say
        self._hints = dict.fromkeys(_POLICYS, policy_hint) | dict.fromkeys(_LOST, lost_hint)
        self._keeps_failed = keeps_failed
        self._last_failure = ""
        self._hint: str | None = None  # where more is known than that the log says it
        self._failed = 0
        self._is_well = False  # one episode has come to its end

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """On to the sink behind."""
        await self._inner.put_step(episode_id, number, step)

    async def discard(self, episode_id: str) -> None:
        """On to the sink behind."""
        await self._inner.discard(episode_id)

    async def finish(self, episode: Episode) -> None:
        """Passes an episode on, unless it failed and those are not kept."""
        if episode.failure is None:
            self._is_well = True
            await self._keep(episode)
            return
        self._note(episode)
        await (self._keep(episode) if self._keeps_failed else self._leave_out(episode))
        if self._failed == HOPELESS_EPISODES and not self._is_well:
            raise AllFailed(
                f"the first {self._failed} episodes failed; the last: {self._last_failure}",
                self._hint,
            )

    def raise_if_all_failed(self, stats: ProgressStats, earlier: int) -> None:
        """Checks that the rollout has a result."""
        played, failed = stats.episodes, stats.finished[EpisodeStatus.FAILED]
        if not failed or earlier:
            return
        if failed == played:
            which = "the only episode" if played == 1 else f"all {played} episodes"
            raise AllFailed(f"{which} failed; the last with {self._last_failure}", self._hint)
        if not self._counts.written:
            raise AllFailed(
                f"{failed} of {played} episodes failed, at least one of each group; the last with "
                f"{self._last_failure}",
                self._hint,
            )

    async def _keep(self, episode: Episode) -> None:
        await self._inner.finish(episode)
        if self._groups is None:
            self._counts.written += 1

    async def _leave_out(self, episode: Episode) -> None:
        if self._groups is None:
            await self._inner.discard(episode.id)
        else:
            await self._groups.leave_out(episode)

    def _note(self, episode: Episode) -> None:
        failure = episode.failure
        assert failure is not None
        self._failed += 1
        self._last_failure = f"{failure.reason}: {failure.message}"
        self._hint = self._hints.get(failure.reason)
        self._counts.last_failures[failure.reason.value] = failure.message
        at = f" at step {failure.step}" if failure.step else ""
        self._say(f"episode {episode.id} failed{at}: {self._last_failure}")
