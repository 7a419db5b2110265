# SPDX-License-Identifier: Apache-2.0
"""What a rollout has done so far, for the progress line and the result."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .episodes import Episode, EpisodeStatus

RATE_SECONDS = 5.0  # the span over which steps a second are averaged
_LEAST_APART_SECONDS = 0.1


class ProgressStats:
    """Counts, from the loop's thread alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._marks: deque[tuple[float, int]] = deque([(self._began_at, 0)])
        self.running = 0
        self.steps = 0
        self.bytes = 0
        self.retries = 0
        self.hung_calls = 0
        self.finished: Counter[EpisodeStatus] = Counter()
        self.failures: Counter[str] = Counter()  # by reason, of episodes
        self.retried: Counter[str] = Counter()  # by reason, of attempts
        self.odd_rewards: Counter[str] = Counter()  # rewards that are no numbers, by their text
        self.episodes_with_odd_rewards = 0
        self._numbers: Counter[EpisodeStatus] = Counter()  # episodes whose reward is a number
        self._rewards: defaultdict[EpisodeStatus, float] = defaultdict(float)

    def step(self, size_bytes: int) -> None:
        """A step was taken."""
        self.steps += 1
        self.bytes += size_bytes

    def end(self, episode: Episode) -> None:
        """An episode has ended, for good."""
        self.finished[episode.status] += 1
        self.odd_rewards.update(episode.odd_rewards)
        if episode.failure is not None:
            self.failures[episode.failure.reason.value] += 1
        elif episode.odd_rewards:
            self.episodes_with_odd_rewards += 1
        else:
            self._numbers[episode.status] += 1
            self._rewards[episode.status] += episode.total_reward

    def retry(self, episode: Episode) -> None:
        """An attempt has failed, and there will be another."""
        self.retries += 1
        if episode.failure is not None:
            self.retried[episode.failure.reason.value] += 1

    def hang(self) -> None:
        """Count a call of a synchronous policy that was abandoned with its thread."""
        self.hung_calls += 1

    @property
    def episodes(self) -> int:
        """How many have ended, well or not."""
        return self.finished.total()

    def mean_reward(self, status: EpisodeStatus) -> float | None:
        """Of the episodes that ended so, and whose reward is a number."""
        count = self._numbers[status]
        return self._rewards[status] / count if count else None

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._began_at

    def steps_per_second(self) -> float:
        """Lately: over the last `RATE_SECONDS`."""
        now = self._clock()
        if now - self._marks[-1][0] >= _LEAST_APART_SECONDS:
            self._marks.append((now, self.steps))
        while len(self._marks) > 2 and self._marks[1][0] <= now - RATE_SECONDS:
            self._marks.popleft()
        at, steps = self._marks[0]
        return (self.steps - steps) / (now - at) if now > at else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, of the whole time."""
        seconds = self.seconds
        return {
            "episodes": self.episodes,
            "done": self.finished[EpisodeStatus.DONE],
            "truncated": self.finished[EpisodeStatus.TRUNCATED],
            "failed": self.finished[EpisodeStatus.FAILED],
            "failures": dict(self.failures),
            "retries": self.retries,
            "retried": dict(self.retried),
            "hung_calls": self.hung_calls,
            "steps": self.steps,
            "bytes": self.bytes,
            "mean_reward": self.mean_reward(EpisodeStatus.DONE),
            "truncated_mean_reward": self.mean_reward(EpisodeStatus.TRUNCATED),
            "odd_rewards": dict(self.odd_rewards),
            "episodes_with_odd_rewards": self.episodes_with_odd_rewards,
            "seconds": seconds,
            "steps_per_second": self.steps / seconds if seconds > 0 else 0.0,
        }


@dataclass
class EpisodeCounts:
    """How many episodes were written, left out or dropped; used by the loop's thread alone."""

    written: int = 0  # also those that a filter dropped, and failed ones that were kept
    left_out: int = 0  # succeeded, but not all of their group
    filtered: Counter[str] = field(default_factory=Counter)  # by the filter that dropped them
    last_failures: dict[str, str] = field(default_factory=dict)  # messages, by reason

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {
            "written": self.written,
            "left_out": self.left_out,
            "filtered": dict(self.filtered),
            "last_failures": self.last_failures,
        }
