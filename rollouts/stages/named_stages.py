# SPDX-License-Identifier: Apache-2.0
"""The stages that `--advantages` and `--filter` name, and whether they may be named so.

group-normalised                 a name of ours
min-steps=3                      one that takes a number
package.module:function          the user's own, looked for when the rollout begins
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import StageNotFound
from . import advantages, filters
from .advantages import Advantages
from .filters import Filter

if TYPE_CHECKING:
    from ..folder.writer import RolloutWriter
    from ..progress_stats import EpisodeCounts
    from .grouping import GroupSink

GROUP_NORMALISED, FAILED, ZERO_ADVANTAGE = "group-normalised", "failed", "zero-advantage"
_ADVANTAGES: dict[str, Advantages] = {
    GROUP_NORMALISED: advantages.group_normalised,
    "leave-one-out": advantages.leave_one_out,
    "centred": advantages.centred,
}
_BY_ALGORITHM = {"grpo": GROUP_NORMALISED, "rloo": "leave-one-out", "dr-grpo": "centred"}
_BOUNDED: dict[str, Callable[[float], Filter]] = {  # both ends are kept
    "min-steps": lambda least: filters.by_length(int(least)),
    "max-steps": lambda most: filters.by_length(most=most),
    "min-reward": lambda least: filters.by_reward(least),
    "max-reward": lambda most: filters.by_reward(most=most),
}
_PLAIN: dict[str, Filter] = {FAILED: filters.failed, ZERO_ADVANTAGE: filters.without_signal}


@dataclass(frozen=True, slots=True)
class Stages:
    """What is done to episodes before they are written; nothing, unless asked for."""

    group: int | None = None  # how many episodes are compared with each other
    advantages: str = GROUP_NORMALISED
    filters: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Of a group; without groups, each episode is looked at by itself."""
        return self.group or 1

    @property
    def takes_failed(self) -> bool:
        """Whether an episode that failed is for a filter to drop."""
        return FAILED in self.filters

    def record(self) -> dict[str, Any]:
        """What must be the same for a rollout to be continued."""
        told = None if self.group is None else self.advantages
        return {"group": self.group, "advantages": told, "filters": list(self.filters)}

    def sink(self) -> Callable[[RolloutWriter, EpisodeCounts], GroupSink] | None:
        """What makes the sink that applies them. None: nothing is to be done."""
        from .grouping import GroupSink  # not in the daemon, which checks names alone

        if self.group is None and not self.filters:
            return None
        weigh: Advantages | None = None
        if self.group is not None:
            weigh = _ADVANTAGES.get(self.advantages) or _users(self.advantages)
        drops = {text: _filter(text) for text in self.filters}
        return lambda writer, counts: GroupSink(
            writer, self.size, filters=drops, advantages=weigh, counts=counts
        )


def _users(text: str) -> Any:
    """The user's own function."""
    from ..policies.named_policy import function_named

    return function_named(text, not_found=StageNotFound)


def _filter(text: str) -> Filter:
    if ":" in text:
        found: Filter = _users(text)
        return found
    name, _, value = text.partition("=")
    return _PLAIN[name] if name in _PLAIN else _BOUNDED[name](bound(name, value))


def check_group(group: int, episodes: int) -> None:
    """Checks that episodes make whole groups."""
    if rest := episodes % group:
        less, more = episodes - rest, episodes - rest + group
        near = f"{less} or {more}" if less else f"{more}"
        raise ValueError(
            f"{episodes} episodes cannot be divided into groups of {group}: ask for {near}"
        )


def check_advantages(text: str, group: int | None) -> None:
    """Checks the value of `--advantages`."""
    if ":" not in text and text not in _ADVANTAGES:
        near = _BY_ALGORITHM.get(text.lower())
        raise ValueError(_unknown("advantages are", text, _ADVANTAGES, near))
    if group is None:
        raise ValueError("advantages compare the episodes of a group: add --group")


def check_filters(texts: Sequence[str], group: int | None) -> None:
    """Checks the values of `--filter`."""
    for number, text in enumerate(texts):
        if ":" not in text:
            name, equals, value = text.partition("=")
            if name in _BOUNDED:
                bound(name, value)
            elif name not in _PLAIN:
                raise ValueError(_unknown("filter is", name, [*_BOUNDED, *_PLAIN]))
            elif equals:
                raise ValueError(f"the filter {name} takes no value")
        if text in texts[:number]:
            raise ValueError(f"the filter {text} is asked for twice")
    if group is None and ZERO_ADVANTAGE in texts:
        raise ValueError(
            f"the filter {ZERO_ADVANTAGE} compares the episodes of a group: add --group"
        )


def bound(name: str, value: str) -> float:
    """The number of `min-steps=3`."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the filter {name} takes a number: {name}=3, not {name}={value}")
    if name in ("min-steps", "max-steps") and (number < 0 or number % 1):
        raise ValueError(f"the filter {name} counts steps: {name}=3, not {name}={value}")
    return number


def _unknown(what: str, text: str, known: Iterable[str], near: str | None = None) -> str:
    names = [near] if near else difflib.get_close_matches(text, list(known), 2)
    meant = f"did you mean {' or '.join(names)}?" if names else f"there are {', '.join(known)}"
    return f"no {what} called {text!r}: {meant}"
