# SPDX-License-Identifier: Apache-2.0
"""Play many episodes of `counter_environment.py` at once, in batches, as a trainer would.

python collect_rollouts.py http://127.0.0.1:21000
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from openenvd.rollouts import RolloutCollector


def policy(observation: dict[str, Any]) -> dict[str, int]:
    """Add three while there is room, then one at a time."""
    missing = observation["target"] - observation["count"]
    return {"amount": 3 if missing >= 3 else 1}


async def collect(address: str) -> float:
    """Return the mean reward of 32 episodes."""
    collector = RolloutCollector(address, policy, concurrency=16, max_steps=20, seed=1)
    rewards: list[float] = []
    async for batch in collector.batches(8, episodes=32):
        rewards += [episode.total_reward for episode in batch]
        print(f"{len(rewards)} episodes, mean reward {sum(rewards) / len(rewards):.2f}")
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    asyncio.run(collect(sys.argv[1]))
