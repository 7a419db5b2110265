# SPDX-License-Identifier: Apache-2.0
"""Advantages, filters, and groups."""

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.episodes import Episode
from openenvd.rollouts.errors import StageError
from openenvd.rollouts.folder.readers import UNFINISHED, open_rollouts
from openenvd.rollouts.folder.writer import CHUNK_BYTES, RolloutWriter
from openenvd.rollouts.stages import sinks
from openenvd.rollouts.stages.sinks import (
    Filter,
    Finished,
    GroupSink,
    centred,
    group_normalised,
    judge,
    leave_one_out,
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
    verdicts = judge(group((1.0, 1), (0.0, 2), (2.0, 3)), {"it": filter_}, None)
    expected = {name: "it" if name in dropped else None for name in "012"}
    assert {name: verdict.filtered for name, verdict in verdicts.items()} == expected


def test_filters_see_what_earlier_ones_kept_and_stages_answer_for_each_episode() -> None:
    members = group((1.0, 9), (1.0, 9), (2.0, 1))
    chosen = {"long": sinks.by_length(5), "same": sinks.without_signal}
    filtered = {name: verdict.filtered for name, verdict in judge(members, chosen, None).items()}
    assert filtered == {"2": "long", "0": "same", "1": "same"}
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
