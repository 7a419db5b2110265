# SPDX-License-Identifier: Apache-2.0
"""Filters: which episodes of a group are not trained on.

A filter is any callable from a group to one answer each: True drops the episode, which is
recorded as finished, with the filter's name and without its steps, so that it is not played
again. Filters run in order; a later one sees only what the earlier ones kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..episodes import Episode, EpisodeStatus


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode of a group. `steps` is how many it has; they may be on disk."""

    episode: Episode
    steps: int


Filter = Callable[[Sequence[Finished]], Sequence[bool]]


def by_length(least: int = 0, most: float = math.inf) -> Filter:
    """Drops episodes of fewer or more steps; both bounds are kept."""
    return lambda group: [not least <= one.steps <= most for one in group]


def by_reward(least: float = -math.inf, most: float = math.inf) -> Filter:
    """Drops episodes whose total reward lies outside; both bounds are kept."""
    return lambda group: [not least <= one.episode.total_reward <= most for one in group]


def failed(group: Sequence[Finished]) -> list[bool]:
    """Drops failed episodes."""
    return [one.episode.status is EpisodeStatus.FAILED for one in group]


def without_signal(group: Sequence[Finished]) -> list[bool]:
    """Drops a whole group in which all rewards are the same: no advantage comes of it."""
    same = len({one.episode.total_reward for one in group}) <= 1
    return [same] * len(group)


def sift(
    group: Sequence[Finished], filters: Mapping[str, Filter]
) -> tuple[list[Finished], dict[str, str]]:
    """What is kept; and by which filter each of the others, by its id, was dropped.

    Raises:
        ValueError: a filter did not answer for each episode.
    """
    kept, dropped = list(group), dict[str, str]()
    for name, drops in filters.items():
        said = list(drops(kept))
        if len(said) != len(kept):
            raise ValueError(f"the filter {name} gave {len(said)} answers for {len(kept)} episodes")
        answers = list(zip(kept, said, strict=True))
        kept = [one for one, drop in answers if not drop]
        dropped |= {one.episode.id: name for one, drop in answers if drop}
    return kept, dropped
