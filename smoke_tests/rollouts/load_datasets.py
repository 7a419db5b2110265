# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `datasets` reads the same rows from FOLDER as we do (`docs/rollouts.md`)."""

import re
import sys
from pathlib import Path
from typing import Any

from openenvd.rollouts.folder.readers import open_rollouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rollouts.md"


def main(folder: Path) -> None:
    rollouts = open_rollouts(folder)
    steps, ends = loaded(folder)
    expected: dict[tuple[str, int], Any] = {
        (episode.id, step.number): step for episode in rollouts for step in episode.steps()
    }
    assert len(steps) == len(expected), f"{len(steps)} of {len(expected)} steps"
    for row in steps:
        step = expected[row["episode_id"], row["step"]]
        for name in ("observation", "action", "info", "reward", "done"):
            assert row[name] == getattr(step, name), f"{name} of {row}"
        assert [told["name"] for told in row["arrays"]] == list(step.arrays)
    totals = {row["episode_id"]: row["episode"] for row in ends}
    assert len(totals) == len(ends) == len(rollouts)
    for episode in rollouts:
        assert totals[episode.id].items() >= dict(episode.row, episode_id=None).items() - {
            ("episode_id", None)
        }
    print(f"{folder.name}: {len(rollouts)} episodes and {len(steps)} steps are the same")


def loaded(folder: Path) -> tuple[Any, Any]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [block] = [block for block in blocks if "load_dataset" in block]
    names: dict[str, Any] = {}
    exec(compile(block.replace('"out/', f'"{folder}/'), str(PAGE), "exec"), names)
    return names["steps"], names["ends"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
