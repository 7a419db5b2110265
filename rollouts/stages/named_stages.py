# SPDX-License-Identifier: Apache-2.0
"""The stages that were asked for by name, as the functions they are. For the names see `naming`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import StageNotFound
from ..policies.named_function import function_named
from . import advantages, filters, naming
from .advantages import Advantages
from .filters import Filter

_ADVANTAGES: dict[str, Advantages] = {
    naming.GROUP_NORMALISED: advantages.group_normalised,
    naming.LEAVE_ONE_OUT: advantages.leave_one_out,
    naming.CENTRED: advantages.centred,
}
_BOUNDED: dict[str, Callable[[float], Filter]] = {
    naming.MIN_STEPS: lambda least: filters.by_length(int(least)),
    naming.MAX_STEPS: lambda most: filters.by_length(most=most),
    naming.MIN_REWARD: lambda least: filters.by_reward(least),
    naming.MAX_REWARD: lambda most: filters.by_reward(most=most),
}
_PLAIN: dict[str, Filter] = {
    naming.FAILED: filters.failed,
    naming.ZERO_ADVANTAGE: filters.without_signal,
}

_named = partial(function_named, not_found=StageNotFound)


@dataclass(frozen=True, slots=True)
class Functions:
    """For a `GroupSink`."""

    size: int
    advantages: Advantages | None  # None: there are no groups
    filters: dict[str, Filter]  # in order, by what they were called


@dataclass(frozen=True, slots=True)
class Stages:
    """What is done to episodes before they are written; nothing, unless asked for."""

    group: int | None = None  # how many episodes are compared with each other
    advantages: str = naming.GROUP_NORMALISED
    filters: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Of a group; without groups, each episode is looked at by itself."""
        return self.group or 1

    @property
    def takes_failed(self) -> bool:
        """Whether an episode that failed is for a filter to drop."""
        return naming.FAILED in self.filters

    def record(self) -> dict[str, Any]:
        """What must be the same for a rollout to be continued."""
        told = None if self.group is None else self.advantages
        return {"group": self.group, "advantages": told, "filters": list(self.filters)}

    def functions(self) -> Functions | None:
        """What they do. None: nothing.

        Raises:
            StageNotFound: one of the user's own cannot be imported.
        """
        if self.group is None and not self.filters:
            return None
        weigh = None if self.group is None else _advantages(self.advantages)
        return Functions(self.size, weigh, {text: _filter(text) for text in self.filters})


def _advantages(text: str) -> Advantages:
    found: Advantages = _ADVANTAGES.get(text) or _named(text)
    return found


def _filter(text: str) -> Filter:
    if naming.is_the_users(text):
        found: Filter = _named(text)
        return found
    name, _, value = text.partition("=")
    return _PLAIN[name] if name in _PLAIN else _BOUNDED[name](naming.bound(name, value))
