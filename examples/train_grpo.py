# SPDX-License-Identifier: Apache-2.0
"""Train a tiny policy on `echo` as GRPO does: groups of episodes, compared with each other.

openenv launch echo
python train_grpo.py http://127.0.0.1:21000 [ITERATIONS]

The policy is a softmax over eight messages; `echo` pays by their length, which the policy does not
know. Each iteration plays groups of episodes, takes as advantage of an episode how much better than
its group it was, in standard deviations, and goes along the gradient of the clipped objective:

    min(r A, clip(r, 1 - e, 1 + e) A)     r: the action's probability now, by that when it was taken

Source: DeepSeekMath, arXiv:2402.03300, section 4.1, without its KL term.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

from openenvd.rollouts import Decision, Episode, RolloutCollector

MESSAGES = tuple("openenvd"[:length] for length in range(1, 9))
GROUP = 8
GROUPS = 8
STEPS = 4  # of an episode
EPOCHS = 4  # updates for each batch
LEARNING_RATE = 2.0
CLIP = 0.2

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Softmax:
    """The policy: one number for each message."""

    def __init__(self, seed: int) -> None:
        self.logits = np.zeros(len(MESSAGES))
        self._random = np.random.default_rng(seed)

    def probabilities(self) -> Floats:
        """Return the probability of each message."""
        powers = np.exp(self.logits - self.logits.max())
        return powers / powers.sum()

    async def __call__(self, observation: dict[str, Any]) -> Decision:
        """Choose a message, and note with which probability."""
        chances = self.probabilities()
        choice = int(self._random.choice(len(MESSAGES), p=chances))
        noted = {"choice": choice, "probability": float(chances[choice])}
        return Decision({"message": MESSAGES[choice]}, noted)

    def improve(self, choices: Floats, before: Floats, advantages: Floats) -> None:
        """Go along the gradient of the clipped objective, several times."""
        taken = np.eye(len(MESSAGES))[choices.astype(int)]
        for _ in range(EPOCHS):
            chances = self.probabilities()
            ratio = (taken @ chances) / before
            is_clipped = np.where(advantages > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
            weight = np.where(is_clipped, 0.0, ratio * advantages)
            self.logits += LEARNING_RATE * (weight[:, None] * (taken - chances)).mean(axis=0)


def advantages_of(group: list[Episode]) -> Floats:
    """Return how much better than its group each episode was, in standard deviations."""
    rewards = np.array([episode.total_reward for episode in group])
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + 1e-6))


def samples_of(episodes: list[Episode]) -> tuple[Floats, Floats, Floats]:
    """Return of each step the choice, its probability then, and its episode's advantage."""
    groups: dict[int | None, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.seed, []).append(episode)
    rows = [
        (step.info["choice"], step.info["probability"], advantage)
        for group in groups.values()
        for episode, advantage in zip(group, advantages_of(group), strict=True)
        for step in episode.steps
    ]
    choices, before, advantages = np.array(rows).T
    return choices, before, advantages


async def train(address: str, iterations: int) -> list[float]:
    """Return the mean reward of a step in each iteration."""
    policy = Softmax(seed=1)
    collector = RolloutCollector(
        address, policy, concurrency=GROUP * GROUPS, max_steps=STEPS, group=GROUP, seed=1
    )
    rewards = []
    for iteration in range(iterations):
        size = GROUP * GROUPS
        async for batch in collector.batches(size, episodes=size):
            policy.improve(*samples_of(batch))
            rewards.append(sum(episode.total_reward for episode in batch) / size / STEPS)
            print(f"iteration {iteration}: mean reward of a step {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40))
