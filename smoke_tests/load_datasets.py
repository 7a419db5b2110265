# SPDX-License-Identifier: Apache-2.0
"""`python smoke_tests/load_datasets.py FOLDER`: Hugging Face's `datasets` reads there what we read,
row for row. Run where both are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset  # type: ignore[import-not-found]

from openenvd.rollouts.folder.hugging_face import BUILDERS, features
from openenvd.rollouts.folder.layout import EPISODES, STEPS
from openenvd.rollouts.folder.readers import EpisodeRow, Rollouts, open_rollouts
from openenvd.rollouts.folder.rows import StepRow


def main(folder: Path) -> None:
    """Compare steps and episodes, loaded in each of the ways that the documentation tells."""
    rollouts = open_rollouts(folder)
    for kind in (STEPS, EPISODES):
        expected = list(_steps(rollouts)) if kind == STEPS else [e.row for e in rollouts]
        for way, rows in _ways(rollouts, kind).items():
            _compare(f"{folder.name}, {kind}, {way}", rows, expected)
    print(f"{folder.name}: {len(rollouts)} episodes and {rollouts.steps} steps are the same")


def _ways(rollouts: Rollouts, kind: str) -> dict[str, Iterable[Any]]:
    files = rollouts.data_files(kind)
    forms = {Path(name).suffix[1:] for name in files}
    ways = {
        "dataset": rollouts.dataset(kind),
        "streaming": rollouts.dataset(kind, streaming=True),
    }
    if len(forms) == 1:
        builder = BUILDERS[forms.pop()]
        told = features(kind)
        ways["load_dataset"] = load_dataset(builder, data_files=files, features=told, split="train")
    return ways


def _steps(rollouts: Rollouts) -> Iterable[dict[str, Any]]:
    for episode in rollouts:
        for step in episode.steps():
            yield {
                "episode_id": episode.id,
                "step": step.number,
                "observation": step.observation,
                "action": step.action,
                "info": step.info,
                "reward": step.reward,
                "done": step.done,
                "arrays": _arrays(rollouts, episode, step),
            }


def _arrays(rollouts: Rollouts, episode: EpisodeRow, step: StepRow) -> list[dict[str, Any]]:
    """How rows tell of arrays; where they say one lies, there it lies."""
    told: list[dict[str, Any]] = step._row["arrays"]
    for array in told:
        path = rollouts.folder / f"arrays-{episode.row['part']:05}.bin"
        with path.open("rb") as file:
            file.seek(episode.row["arrays_offset"] + array["offset"])
            assert file.read(array["bytes"]) == bytes(step.arrays[array["name"]].data)
    return told


def _compare(what: str, rows: Iterable[Mapping[str, Any]], expected: list[Any]) -> None:
    count = 0
    for number, row in enumerate(rows):
        assert dict(row) == dict(expected[number]), f"{what}, row {number}: {row}"
        count += 1
    assert count == len(expected), f"{what}: {count} of {len(expected)} rows"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
