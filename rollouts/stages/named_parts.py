# SPDX-License-Identifier: Apache-2.0
"""Resolves the names in `--advantages`, `--filter` and `--policy`.

group-normalised                 a built-in name
min-steps=3                      a built-in name with a number
package.module:function          the user's own, imported when the rollout begins

A policy may also be `openai:URL` or `random`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...system.text.units import near_matches, plural
from ..errors import PolicyNotFound, StageNotFound
from ..policies.chat_policy import ChatPolicy
from ..policies.policy import CallablePolicy, Policy
from ..policies.random_policy import RandomPolicy, action_schema
from . import sinks
from .sinks import Advantages, Filter

RANDOM = "random"
CHAT_PREFIX = "openai:"
_WHAT = {PolicyNotFound: "policy", StageNotFound: "stage"}


async def policy_named(name: str, address: str) -> Policy:
    """Return the policy; the server at `address` has the schema of actions."""
    if name != RANDOM and not name.startswith(CHAT_PREFIX):
        return CallablePolicy(await asyncio.to_thread(function_named, name))
    schema = await asyncio.to_thread(action_schema, address)
    return RandomPolicy(schema) if name == RANDOM else ChatPolicy(name[len(CHAT_PREFIX) :], schema)


def function_named(
    name: str, not_found: type[PolicyNotFound | StageNotFound] = PolicyNotFound
) -> Any:
    """Return the object that `package.module:function` names."""
    what = _WHAT[not_found]
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise not_found(f"{name!r} does not name a {what}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise not_found(f"the {what} {name!r} cannot be imported: {exc}") from exc
    except Exception as exc:
        message = f"importing the {what} {name!r} raised {type(exc).__name__}: {exc}"
        raise not_found(message, "run it by itself to see where") from exc
    if not callable(found):
        raise not_found(f"the {what} {name!r} cannot be called")
    return found


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Make the modules of the user's folder importable, and unload them afterwards.

    A later rollout in the same process then imports their present files.
    """
    if folder is None:
        yield
        return
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        # A package's `__path__` is computed by its parent, so modules go before their packages.
        for name in sorted(set(sys.modules) - before, reverse=True):
            path = getattr(sys.modules[name], "__file__", None)  # None: a namespace package
            paths = getattr(sys.modules[name], "__path__", ()) if path is None else (path,)
            if any(Path(path).is_relative_to(folder) for path in paths):
                del sys.modules[name]


GROUP_NORMALISED, FAILED, ZERO_ADVANTAGE = "group-normalised", "failed", "zero-advantage"
_ADVANTAGES: dict[str, Advantages] = {
    GROUP_NORMALISED: sinks.group_normalised,
    "leave-one-out": sinks.leave_one_out,
    "centred": sinks.centred,
}
_BY_ALGORITHM = {"grpo": GROUP_NORMALISED, "rloo": "leave-one-out", "dr-grpo": "centred"}
_BOUNDED: dict[str, Callable[[float], Filter]] = {  # bounds are inclusive
    "min-steps": lambda least: sinks.by_length(int(least)),
    "max-steps": lambda most: sinks.by_length(most=most),
    "min-reward": lambda least: sinks.by_reward(least),
    "max-reward": lambda most: sinks.by_reward(most=most),
}
_PLAIN: dict[str, Filter] = {FAILED: sinks.failed, ZERO_ADVANTAGE: sinks.without_signal}


@dataclass(frozen=True, slots=True)
class Stages:
    """The processing of episodes before they are written; by default none."""

    group: int | None = None  # number of episodes that are compared with each other
    advantages: str = GROUP_NORMALISED
    filters: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The size of a group; without groups, each episode is one."""
        return self.group or 1

    def record(self) -> dict[str, Any]:
        """Return the settings that must be unchanged when a rollout is continued."""
        advantages = None if self.group is None else self.advantages
        return {"group": self.group, "advantages": advantages, "filters": list(self.filters)}

    def functions(self) -> tuple[Advantages | None, dict[str, Filter]]:
        """Import the user's own functions; return how advantages are computed, and the filters."""
        weigh: Advantages | None = None
        if self.group is not None:
            name = self.advantages
            weigh = _ADVANTAGES.get(name) or function_named(name, StageNotFound)
        return weigh, {text: _filter(text) for text in self.filters}


def _filter(text: str) -> Filter:
    """Return the filter of a name, or the user's own; `ValueError` for a wrong name or number."""
    if ":" in text:
        found: Filter = function_named(text, StageNotFound)
        return found
    name, equals, value = text.partition("=")
    if name in _BOUNDED:
        return _BOUNDED[name](bound(name, value))
    if name not in _PLAIN:
        raise ValueError(_unknown("filter is", name, [*_BOUNDED, *_PLAIN]))
    if equals:
        raise ValueError(f"the filter {name} takes no value")
    return _PLAIN[name]


def check_group(group: int, episodes: int) -> None:
    """Check that episodes make whole groups."""
    if rest := episodes % group:
        less, more = episodes - rest, episodes - rest + group
        near = f"{less} or {more}" if less else f"{more}"
        count = plural(episodes, "episode")
        raise ValueError(f"{count} cannot be divided into groups of {group}: ask for {near}")


def check_advantages(text: str, group: int | None) -> None:
    """Check the value of `--advantages`."""
    if ":" not in text and text not in _ADVANTAGES:
        raise ValueError(_unknown("advantages are", text, _ADVANTAGES))
    if group is None:
        raise ValueError("advantages compare the episodes of a group: add --group")


def check_filters(texts: Sequence[str], group: int | None) -> None:
    """Check the values of `--filter`."""
    for number, text in enumerate(texts):
        if ":" not in text:
            _filter(text)
        if text in texts[:number]:
            raise ValueError(f"the filter {text} is asked for twice")
    if group is None and ZERO_ADVANTAGE in texts:
        raise ValueError(f"the filter {ZERO_ADVANTAGE} compares episodes of a group: add --group")


def bound(name: str, value: str) -> float:
    """Return the number of `min-steps=3`."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the filter {name} takes a number: {name}=3, not {name}={value}")
    if name in ("min-steps", "max-steps") and (number < 0 or number % 1):
        raise ValueError(f"the filter {name} counts steps: {name}=3, not {name}={value}")
    return number


def _unknown(what: str, text: str, known: Iterable[str]) -> str:
    name = _BY_ALGORITHM.get(text.lower(), text)
    _, meant = near_matches(name, known, f"there are {', '.join(known)}")
    return f"no {what} called {text!r}: {meant}"
