# SPDX-License-Identifier: Apache-2.0
"""What `rollout_folder.py` measures, in the Python that runs this file by its path.

    PYTHON load_tests/peers/folder_work.py write FOLDER EPISODES
    PYTHON load_tests/peers/folder_work.py resume|read FOLDER
    PYTHON load_tests/peers/folder_work.py datasets PATTERN CACHE

Prints one line of JSON: seconds. `datasets` needs Hugging Face's library and nothing of ours. The
writer of an earlier tree has a `reserve`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

STEPS = 5
CONCURRENCY = 64


async def write(folder: str, episodes: str) -> dict[str, float]:
    """Episodes of a few hundred bytes a step, by so many writers at once."""
    from openenvd.rollouts.episodes import Episode, EpisodeStatus, Step
    from openenvd.rollouts.folder.writer import RolloutWriter

    async def slot(numbers: Any) -> None:
        for number in numbers:
            name = f"{number:06}"
            for at in range(STEPS):
                seen = {"text": "x" * 200, "at": at, "worth": None if number % 2 else at}
                step = Step.of(seen, {"move": at}, 1.0, at == STEPS - 1)
                room = [await writer.reserve(step.size_bytes)] if is_earlier else []
                await writer.put_step(name, at, step, *room)
            await writer.finish(Episode(name, "e", 1, (), 5.0, EpisodeStatus.DONE, 1.0, 2.0))

    writer: Any = await RolloutWriter.open(folder)
    is_earlier = hasattr(writer, "reserve")
    began = time.monotonic()
    numbers = iter(range(int(episodes)))
    await asyncio.gather(*(slot(numbers) for _ in range(CONCURRENCY)))
    written = time.monotonic()
    await writer.close()
    return {"write": written - began, "close": time.monotonic() - written}


async def resume(folder: str) -> dict[str, float]:
    """Until it is known which episodes exist."""
    from openenvd.rollouts.folder.writer import RolloutWriter

    began = time.monotonic()
    writer = await RolloutWriter.open(folder)
    count = len(writer.finished_episode_ids())
    seconds = time.monotonic() - began
    await writer.close()
    return {"resume": seconds, "episodes": count}


async def read(folder: str) -> dict[str, float]:
    """Until the folder is open; and until all totals are read."""
    from openenvd.rollouts.folder.readers import open_rollouts

    began = time.monotonic()
    rollouts = open_rollouts(folder)
    opened = time.monotonic()
    steps = sum(episode.row["steps"] for episode in rollouts)
    return {"open": opened - began, "totals": time.monotonic() - opened, "steps": steps}


async def load(pattern: str, cache: str) -> dict[str, float]:
    """Until `load_dataset` has all steps."""
    from datasets import Features, Json, Value, load_dataset

    fields = ("observation", "action", "info", "arrays", "episode")
    texts = dict.fromkeys(("kind", "episode_id"), Value("string"))
    features = Features(
        {
            **texts,
            "step": Value("int64"),
            **dict.fromkeys(fields, Json()),
            "reward": Value("float64"),
            "done": Value("bool"),
        }
    )
    began = time.monotonic()
    rows = load_dataset(
        "json", data_files=pattern, features=features, split="train", cache_dir=cache
    )
    seconds = time.monotonic() - began
    return {"load": seconds, "steps": sum(reward is not None for reward in rows["reward"])}


if __name__ == "__main__":
    kinds: dict[str, Callable[..., Coroutine[Any, Any, dict[str, float]]]] = {
        "write": write,
        "resume": resume,
        "read": read,
        "datasets": load,
    }
    work = kinds[sys.argv[1]]
    files = len(list(Path(sys.argv[2]).glob("**/*.jsonl"))) if sys.argv[1] == "read" else 0
    print(json.dumps({**asyncio.run(work(*sys.argv[2:])), "files": files}))
