# SPDX-License-Identifier: Apache-2.0
"""Episodes and folders for the tests of what is written and read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, Step
from openenvd.rollouts.folder.writer import RolloutWriter


def step(
    number: int = 0, text: str = "seen", arrays: Mapping[str, Array] | None = None, **more: Any
) -> Step:
    """The step with that number; `text` is its weight."""
    observation, action = {"text": text, "number": number}, {"move": number}
    return Step.of(observation, action, float(number), False, more, arrays)


def image(value: int, size_bytes: int = 100) -> Array:
    """An array of a size that is no multiple of anything, every byte of it `value`."""
    return Array(bytes([value]) * size_bytes, "uint8", (size_bytes,))


def episode(episode_id: str, steps: int = 0, reward: float = 1.0, **fields: Any) -> Episode:
    """A finished one; with `steps`, they are in it."""
    made = tuple(step(number) for number in range(steps))
    told = {"status": EpisodeStatus.DONE, "started_at": 1.0, "finished_at": 2.0, **fields}
    return Episode(episode_id, "ws://env", 7, made, reward, **told)


async def put_steps(
    writer: RolloutWriter, episode_id: str, steps: int = 3, text: str = "seen"
) -> None:
    """The steps of an episode that is not finished."""
    for number in range(steps):
        await writer.put_step(episode_id, number, step(number, text))


async def written(folder: Path, *episode_ids: str, **fields: Any) -> None:
    async with await RolloutWriter.open(folder) as writer:
        for name in episode_ids:
            await finish(writer, name, **fields)


async def finish(
    writer: RolloutWriter, episode_id: str, steps: int = 3, text: str = "seen", **fields: Any
) -> None:
    await put_steps(writer, episode_id, steps, text)
    await writer.finish(episode(episode_id, **fields))


def rows(folder: Path, kind: str = "end") -> list[dict[str, Any]]:
    """What a pattern finds in a folder, of a kind of rows; of ends the totals, and the ids."""
    found = [
        json.loads(line)
        for path in sorted(folder.glob("**/*.jsonl"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        for line in path.read_bytes().splitlines()
    ]
    told = [row for row in found if row["kind"] == kind]
    return [{**row, **row["episode"]} for row in told] if kind == "end" else told


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("**/*.jsonl"))
