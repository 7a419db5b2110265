# SPDX-License-Identifier: Apache-2.0
"""Episodes and folders for the tests of what is written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, Step
from openenvd.rollouts.folder.output import Output


def step(
    number: int = 0, text: str = "seen", arrays: Mapping[str, Array] | None = None, **more: Any
) -> Step:
    """The step with that number; `text` is its weight."""
    observation, action = {"text": text, "number": number}, {"move": number}
    return Step.of(observation, action, float(number), False, more, arrays)


def image(value: int, size_bytes: int = 100) -> Array:
    """An array of a size that no alignment likes, every byte of it `value`."""
    return Array(bytes([value]) * size_bytes, "uint8", (size_bytes,))


def episode(episode_id: str, steps: int = 0, reward: float = 1.0, **fields: Any) -> Episode:
    """A finished one; with `steps`, they are in it."""
    made = tuple(step(number) for number in range(steps))
    told = {"status": EpisodeStatus.DONE, "started_at": 1.0, "finished_at": 2.0, **fields}
    return Episode(episode_id, "ws://env", 7, made, reward, **told)


def finish(output: Output, episode_id: str, steps: int = 3, text: str = "seen") -> None:
    """An episode, step by step, to its end."""
    for number in range(steps):
        output.put_step(episode_id, number, step(number, text))
    output.finish(episode(episode_id))


def names(folder: Path) -> list[str]:
    """What lies in a folder, apart from what is always there."""
    always = {"manifest.jsonl", ".lock", "spool"}
    return sorted(path.name for path in folder.iterdir() if path.name not in always)
