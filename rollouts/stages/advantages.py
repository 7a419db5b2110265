# SPDX-License-Identifier: Apache-2.0
"""Advantages: how much better an episode was than the others of its group.

Plain functions from the rewards of a group to as many advantages, in the same order. A group of one
says nothing: its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

LEAST_DEVIATION = 1e-6  # added to the deviation, so that equal rewards are no division by zero

Advantages = Callable[[Sequence[float]], list[float]]


def centred(rewards: Sequence[float]) -> list[float]:
    """Reward less the group's mean (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    mean = _mean(rewards)
    return [reward - mean for reward in rewards]


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """In standard deviations from the group's mean (GRPO, https://arxiv.org/abs/2402.03300)."""
    differences = centred(rewards)
    deviation = math.sqrt(_mean([difference**2 for difference in differences]))
    return [difference / (deviation + LEAST_DEVIATION) for difference in differences]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Reward less the mean of the *other* episodes (RLOO, https://arxiv.org/abs/2402.14740)."""
    others = len(rewards) - 1
    if others < 1:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / others for reward in rewards]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
