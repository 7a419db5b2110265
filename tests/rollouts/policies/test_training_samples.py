# SPDX-License-Identifier: Apache-2.0
"""`examples/training_samples.py`: token ids that a policy noted, joined to training samples."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openenvd.rollouts.episodes import Array, Step
from openenvd.rollouts.errors import StageError
from openenvd.rollouts.folder.rows import Verdict
from openenvd.rollouts.folder.writer import RolloutWriter

from ..made import episode, step

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
samples: Any = importlib.import_module("training_samples")


def experts(first: int, rows: int) -> Array:
    """A row per token, which says which token."""
    values = np.arange(first, first + rows, dtype="<i2").repeat(4).reshape(rows, 2, 2)
    return Array(values.tobytes(), "<i2", values.shape)


def conversation(turns: int, prompt: int = 3, answer: int = 2) -> list[Any]:
    """Return steps whose prompts repeat all earlier turns; a turn's last token has no row."""
    steps, history = [], list[int]()
    for _ in range(turns):
        history += range(len(history), len(history) + prompt)
        completion = list(range(len(history), len(history) + answer))
        rows = experts(0, len(history) + answer - 1)
        steps.append(
            samples.TokenStep(list(history), completion, [-1.0] * answer, {"experts": rows})
        )
        history += completion
    return steps


def test_turns_become_one_sample_a_rewritten_history_another_and_no_steps_none() -> None:
    [sample] = samples.interleave(conversation(3), advantage=0.5)
    assert list(sample.token_ids) == list(range(15))
    assert sample.mask == bytes([0, 0, 0, 1, 1] * 3)
    assert list(sample.logprobs) == [0, 0, 0, -1, -1] * 3
    assert sample.advantage == 0.5
    first, second = conversation(2)
    other = samples.TokenStep([7, 7], [8])
    made = samples.interleave([first, second, other])
    assert [list(sample.mask) for sample in made] == [[0, 0, 0, 1, 1] * 2, [0, 0, 1]]
    assert samples.interleave([]) == []


def test_joining_is_the_same_as_joining_at_each_step() -> None:
    """The naive way, byte for byte."""
    steps = conversation(20, prompt=11, answer=7)
    joined = np.zeros((0, 2, 2), dtype="<i2")
    for number, one in enumerate(steps):
        rows = one.arrays["experts"]
        values = np.frombuffer(rows.data, rows.dtype).reshape(rows.shape)
        joined = np.concatenate([joined, values[len(joined) :]])
        if number == len(steps) - 1:
            joined = np.concatenate([joined, np.zeros((1, 2, 2), dtype="<i2")])
    [sample] = samples.interleave(steps)
    assert sample.arrays["experts"].data == joined.tobytes()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"arrays": {"experts": Array(bytes(16), "<i4", (1, 2, 2))}}, "changes its form"),
        ({"arrays": {"experts": experts(0, 99)}}, "99 rows"),
        ({"logprobs": [1.0]}, "1 logprobs for 2"),
    ],
)
def test_arrays_that_do_not_fit_their_step_are_an_error(
    changed: dict[str, object], expected: str
) -> None:
    first, second = conversation(2)
    with pytest.raises(StageError, match=expected):
        samples.interleave([first, replace(second, **changed)])


def ids(*values: int, dtype: str = "int32") -> Array:
    return Array(np.array(values, dtype=dtype).tobytes(), dtype, (len(values),))


def test_tokens_are_found_in_arrays_and_in_the_info() -> None:
    arrays = {
        "prompt_ids": ids(1, 2),
        "completion_ids": ids(3, dtype="int64"),
        "logprobs": Array(np.array([-2.0], "<f4").tobytes(), "float32", (1,)),
        "experts": experts(0, 2),
    }
    found = samples.tokens_of(step(arrays=arrays))
    assert (list(found.prompt_ids), list(found.completion_ids)) == ([1, 2], [3])
    assert (list(found.logprobs), set(found.arrays)) == ([-2.0], {"experts"})
    found = samples.tokens_of(step(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-2.0]))
    assert (list(found.prompt_ids), list(found.completion_ids)) == ([1, 2], [3])
    assert list(found.logprobs) == [-2.0]


@pytest.mark.parametrize(
    "bad",
    [
        step(),
        step(arrays={"prompt_ids": ids(1, dtype="uint8"), "completion_ids": ids(1)}),
        step(
            arrays={
                "prompt_ids": ids(1),
                "completion_ids": ids(1),
                "logprobs": Array(bytes(2), "float16", (1,)),
            }
        ),
    ],
)
def test_a_step_without_usable_tokens_is_an_error(bad: Step) -> None:
    with pytest.raises(StageError):
        samples.tokens_of(bad)


async def test_the_samples_of_a_folder_join_its_conversations(tmp_path: Path) -> None:
    first: dict[str, Any] = {"prompt_ids": [1, 2], "completion_ids": [3]}
    second: dict[str, Any] = {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5]}
    async with await RolloutWriter.open(tmp_path) as writer:
        for number, info in enumerate((first, second)):
            await writer.put_step("a", number, step(**info))
        await writer.finish_together([(episode("a"), Verdict(advantage=0.5))])
    [sample] = samples.training_samples(tmp_path)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (sample.mask, sample.advantage) == (b"\0\0\1\0\1", 0.5)
