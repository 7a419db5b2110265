# SPDX-License-Identifier: Apache-2.0
"""Advantages, filters, groups, and training samples."""

import asyncio
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openenvd.rollouts.episodes import Array, Episode, Step
from openenvd.rollouts.errors import StageError
from openenvd.rollouts.folder.readers import UNFINISHED, open_rollouts
from openenvd.rollouts.folder.rows import Verdict
from openenvd.rollouts.folder.writer import CHUNK_BYTES, RolloutWriter
from openenvd.rollouts.stages import sinks
from openenvd.rollouts.stages.interleave import TokenStep, interleave, tokens_of
from openenvd.rollouts.stages.sinks import (
    Filter,
    Finished,
    GroupSink,
    centred,
    group_normalised,
    judge,
    leave_one_out,
    sift,
)

from ..made import episode, step


def test_normalised_advantages_have_no_mean_and_unit_deviation() -> None:
    found = group_normalised([1.0, 2.0, 3.0, 6.0])
    assert statistics.fmean(found) == pytest.approx(0.0)
    assert statistics.pstdev(found) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [(leave_one_out, [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5]), (centred, [-2.0, -1.0, 3.0])],
)
def test_advantages_compare_with_the_others(
    advantages: Callable[[Sequence[float]], list[float]], expected: list[float]
) -> None:
    assert advantages([1.0, 2.0, 6.0]) == expected


@pytest.mark.parametrize("advantages", [group_normalised, leave_one_out, centred])
@pytest.mark.parametrize("rewards", [[], [5.0], [5.0, 5.0, 5.0]])
def test_equal_rewards_give_no_advantage(
    advantages: Callable[[Sequence[float]], list[float]], rewards: list[float]
) -> None:
    assert advantages(rewards) == [0.0] * len(rewards)


def group(*rewards_and_steps: tuple[float, int]) -> list[Finished]:
    return [
        Finished(episode(str(number), reward=reward), steps)
        for number, (reward, steps) in enumerate(rewards_and_steps)
    ]


@pytest.mark.parametrize(
    ("filter_", "dropped"),
    [
        (sinks.by_length(2), "0"),
        (sinks.by_length(most=2), "2"),
        (sinks.by_reward(0.5), "1"),
        (sinks.by_reward(most=0.5), "02"),
        (sinks.failed, ""),
        (sinks.without_signal, ""),
    ],
)
def test_a_filter_drops_what_it_names(filter_: Filter, dropped: str) -> None:
    kept, found = sift(group((1.0, 1), (0.0, 2), (2.0, 3)), {"it": filter_})
    assert "".join(found) == dropped
    assert set(found.values()) <= {"it"}
    assert len(kept) == 3 - len(dropped)


def test_filters_see_what_earlier_ones_kept_and_stages_answer_for_each_episode() -> None:
    members = group((1.0, 9), (1.0, 9), (2.0, 1))
    chosen = {"long": sinks.by_length(5), "same": sinks.without_signal}
    kept, dropped = sift(members, chosen)
    assert (kept, dropped) == ([], {"2": "long", "0": "same", "1": "same"})
    verdicts = judge(group((1.0, 9), (3.0, 9), (99.0, 1)), {"long": sinks.by_length(5)}, centred)
    assert [verdicts[i].advantage for i in "012"] == [-1.0, 1.0, None]
    assert verdicts["2"].filtered == "long"
    verdicts = judge(group((1.0, 1), (math.nan, 1), (3.0, 1)), {}, centred)
    assert [verdicts[name].advantage for name in "012"] == [-1.0, None, 1.0]
    members = group((1.0, 9), (3.0, 9))
    with pytest.raises(ValueError, match="the filter half gave 1 answers for 2 episodes"):
        judge(members, {"half": lambda seen: [True] * (len(seen) // 2)}, centred)
    with pytest.raises(ValueError, match="there are 3 advantages for 2 episodes"):
        judge(members, {}, lambda rewards: [0.0, *rewards])


async def test_a_stage_sees_its_group_in_the_order_of_the_ids(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def noted(rewards: Sequence[float]) -> list[float]:
        seen.append(list(rewards))
        return list(rewards)

    sink = GroupSink(await RolloutWriter.open(tmp_path), 3, advantages=noted)
    for number in (2, 0, 1):
        await sink.finish(episode(f"{number:06}", reward=float(number)))
    await sink.close()
    assert seen == [[0.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("broken", "why"),
    [(lambda _: [1 / 0], "ZeroDivisionError"), (lambda _: ["much"], "convert string to float")],
)
async def test_a_stage_that_fails_names_the_group(
    tmp_path: Path, broken: Callable[[Sequence[float]], list[float]], why: str
) -> None:
    sink = GroupSink(await RolloutWriter.open(tmp_path), 1, advantages=broken)
    with pytest.raises(StageError, match=rf"000003.*{why}"):
        await sink.finish(episode("000003"))
    await sink.close()


# Training samples.


def experts(first: int, rows: int) -> Array:
    """A row per token, which says which token."""
    values = np.arange(first, first + rows, dtype="<i2").repeat(4).reshape(rows, 2, 2)
    return Array(values.tobytes(), "<i2", values.shape)


def conversation(turns: int, prompt: int = 3, answer: int = 2) -> list[TokenStep]:
    """Each turn's prompt has all that came before; there is no row for a turn's last token."""
    steps, history = [], list[int]()
    for _ in range(turns):
        history += range(len(history), len(history) + prompt)
        completion = list(range(len(history), len(history) + answer))
        rows = experts(0, len(history) + answer - 1)
        steps.append(TokenStep(list(history), completion, [-1.0] * answer, {"experts": rows}))
        history += completion
    return steps


def test_turns_become_one_sample_a_rewritten_history_another_and_no_steps_none() -> None:
    [sample] = interleave(conversation(3), advantage=0.5)
    assert list(sample.token_ids) == list(range(15))
    assert sample.mask == bytes([0, 0, 0, 1, 1] * 3)
    assert list(sample.logprobs) == [0, 0, 0, -1, -1] * 3
    assert sample.advantage == 0.5
    first, second = conversation(2)
    other = TokenStep([7, 7], [8])
    samples = interleave([first, second, other])
    assert [list(sample.mask) for sample in samples] == [[0, 0, 0, 1, 1] * 2, [0, 0, 1]]
    assert interleave([]) == []


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
    [sample] = interleave(steps)
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
        interleave([first, replace(second, **changed)])  # type: ignore[arg-type]


def ids(*values: int, dtype: str = "int32") -> Array:
    return Array(np.array(values, dtype=dtype).tobytes(), dtype, (len(values),))


def test_tokens_are_found_in_arrays_and_in_the_info() -> None:
    arrays = {
        "prompt_ids": ids(1, 2),
        "completion_ids": ids(3, dtype="int64"),
        "logprobs": Array(np.array([-2.0], "<f4").tobytes(), "float32", (1,)),
        "experts": experts(0, 2),
    }
    found = tokens_of(step(arrays=arrays))
    assert (list(found.prompt_ids), list(found.completion_ids)) == ([1, 2], [3])
    assert (list(found.logprobs), set(found.arrays)) == ([-2.0], {"experts"})
    found = tokens_of(step(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-2.0]))
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
        tokens_of(bad)


# Groups wait for their members and leave as a whole


SIZES = [10, 5000, CHUNK_BYTES]  # of a last observation: in the summary, in memory, on disk


async def play(sink: GroupSink, number: int, **fields: Any) -> Episode:
    one = episode(f"{number:06}", reward=float(number), **fields)
    await sink.put_step(one.id, 0, step())
    return one


def last(number: int, size: int) -> bytes:
    return b'"' + str(number).encode() * size + b'"'


@pytest.mark.parametrize("size", SIZES)
async def test_last_observations_wait_for_their_group_and_are_written_unchanged(
    tmp_path: Path, size: int
) -> None:
    sink = GroupSink(await RolloutWriter.open(tmp_path), 3, advantages=centred)
    for number in range(3):
        await sink.finish(await play(sink, number, final_observation_json=last(number, size)))
        if size > SIZES[0] and number < 2:
            kept = [one.episode.final_observation_json for one in sink._waiting[0]]
            assert kept == [b"null"] * (number + 1)
        on_disk = number + 1 if size == CHUNK_BYTES and number < 2 else 0
        if number < 2:
            assert len(list((tmp_path / UNFINISHED).iterdir())) == on_disk
    await sink.close()
    found = list(open_rollouts(tmp_path))
    assert [e.final_observation for e in found] == [str(n) * size for n in range(3)]
    assert [e.row["advantage"] for e in found] == [-1.0, 0.0, 1.0]
    open_rollouts(tmp_path).verify()


@pytest.mark.parametrize("size", SIZES)
async def test_a_filter_sees_the_last_observation_of_an_episode(tmp_path: Path, size: int) -> None:
    def second(group: Sequence[Any]) -> list[bool]:
        return [one.episode.final_observation == "1" * size for one in group]

    writer = await RolloutWriter.open(tmp_path)
    sink = GroupSink(writer, 2, filters={"second": second}, advantages=None)
    for number in range(2):
        await sink.finish(await play(sink, number, final_observation_json=last(number, size)))
    await sink.close()
    rows = [e.row for e in open_rollouts(tmp_path)]
    assert [(row["filtered"], row["advantage"]) for row in rows] == [(None, None), ("second", None)]
    assert (sink.counts.written, sink.counts.filtered) == (2, {"second": 1})


async def test_groups_that_end_at_once_are_each_whole(tmp_path: Path) -> None:
    sink = GroupSink(await RolloutWriter.open(tmp_path), 4, advantages=centred)
    order = [number * 7 % 64 for number in range(64)]  # as they may finish
    ended = [await play(sink, n, final_observation_json=last(n, 5000)) for n in order]
    await asyncio.gather(*(sink.finish(one) for one in ended))
    await sink.close()
    found = {e.id: e.row for e in open_rollouts(tmp_path)}
    assert [found[f"{n:06}"]["advantage"] for n in range(64)] == [-1.5, -0.5, 0.5, 1.5] * 16


PAGE = Path(__file__).resolve().parents[3] / "docs" / "rollouts.md"


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
