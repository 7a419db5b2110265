# SPDX-License-Identifier: Apache-2.0
"""What `--advantages` and `--filter` may say. Imports no stage: the daemon validates with it.

group-normalised                 a name of ours
min-steps=3                      one that takes a number
package.module:function          the user's own, looked for when the rollout begins
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

GROUP_NORMALISED, LEAVE_ONE_OUT, CENTRED = "group-normalised", "leave-one-out", "centred"
ADVANTAGES = (GROUP_NORMALISED, LEAVE_ONE_OUT, CENTRED)
MIN_STEPS, MAX_STEPS = "min-steps", "max-steps"
MIN_REWARD, MAX_REWARD = "min-reward", "max-reward"
BOUNDS = (MIN_STEPS, MAX_STEPS, MIN_REWARD, MAX_REWARD)  # both ends are kept
FAILED, ZERO_ADVANTAGE = "failed", "zero-advantage"
FILTERS = (*BOUNDS, FAILED, ZERO_ADVANTAGE)

_BY_ALGORITHM = {"grpo": GROUP_NORMALISED, "rloo": LEAVE_ONE_OUT, "dr-grpo": CENTRED}


def is_the_users(text: str) -> bool:
    """Whether it names a function of the user's own."""
    return ":" in text


def check_group(group: int, episodes: int) -> None:
    """Checks that episodes make whole groups.

    Raises:
        ValueError: The last group would not be whole.
    """
    if rest := episodes % group:
        less, more = episodes - rest, episodes - rest + group
        near = f"{less} or {more}" if less else f"{more}"
        raise ValueError(
            f"{episodes} episodes cannot be divided into groups of {group}: ask for {near}"
        )


def check_advantages(text: str, group: int | None) -> None:
    """Checks the value of `--advantages`.

    Raises:
        ValueError: The name is unknown, or there are no groups.
    """
    if not is_the_users(text) and text not in ADVANTAGES:
        near = _BY_ALGORITHM.get(text.lower())
        raise ValueError(_unknown("advantages are", text, ADVANTAGES, near))
    if group is None:
        raise ValueError("advantages compare the episodes of a group: add --group")


def check_filters(texts: Sequence[str], group: int | None) -> None:
    """Checks the values of `--filter`.

    Raises:
        ValueError: A name is unknown, its number is wrong, it needs groups and there are none, or
            it is there twice.
    """
    for number, text in enumerate(texts):
        _check_filter(text)
        if text in texts[:number]:
            raise ValueError(f"the filter {text} is asked for twice")
    if group is None and ZERO_ADVANTAGE in texts:
        raise ValueError(
            f"the filter {ZERO_ADVANTAGE} compares the episodes of a group: add --group"
        )


def _check_filter(text: str) -> None:
    if is_the_users(text):
        return
    name, equals, value = text.partition("=")
    if name not in FILTERS:
        raise ValueError(_unknown("filter is", name, FILTERS))
    if name in BOUNDS:
        bound(name, value)
    elif equals:
        raise ValueError(f"the filter {name} takes no value")


def bound(name: str, value: str) -> float:
    """The number of `min-steps=3`.

    Raises:
        ValueError: it is none, or none that makes sense there.
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the filter {name} takes a number: {name}=3, not {name}={value}")
    if name in (MIN_STEPS, MAX_STEPS) and (number < 0 or number % 1):
        raise ValueError(f"the filter {name} counts steps: {name}=3, not {name}={value}")
    return number


def _unknown(what: str, text: str, known: Iterable[str], near: str | None = None) -> str:
    names = [near] if near else difflib.get_close_matches(text, list(known), 2)
    meant = f"did you mean {' or '.join(names)}?" if names else f"there are {', '.join(known)}"
    return f"no {what} called {text!r}: {meant}"
