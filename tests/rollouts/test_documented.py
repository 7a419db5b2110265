# SPDX-License-Identifier: Apache-2.0
"""The examples of `docs/rollouts.md` that read a folder do what they say.

All of the page run in `smoke_tests/test_pages.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from openenvd.rollouts.folder.rows import Verdict
from openenvd.rollouts.folder.writer import RolloutWriter

from .made import episode, step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rollouts.md"


def example(words: str) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [block] = [block for block in blocks if words in block]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


async def test_the_example_of_training_samples_joins_a_conversation(
    tmp_path: Path,
) -> None:
    first: dict[str, Any] = {"prompt_ids": [1, 2], "completion_ids": [3]}
    second: dict[str, Any] = {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5]}
    async with await RolloutWriter.open(tmp_path) as writer:
        for number, info in enumerate((first, second)):
            await writer.put_step("a", number, step(**info))
        await writer.finish_together([(episode("a"), Verdict(advantage=0.5))])
    [sample] = example("interleave")["training_samples"](tmp_path)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (sample.mask, sample.advantage) == (b"\0\0\1\0\1", 0.5)
