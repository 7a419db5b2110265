# SPDX-License-Identifier: Apache-2.0
"""Groups wait for their members and leave as a whole; `test_folder.py` has what crashes leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.episodes import Episode
from openenvd.rollouts.folder.readers import UNFINISHED, open_rollouts
from openenvd.rollouts.folder.writer import CHUNK_BYTES, RolloutWriter
from openenvd.rollouts.stages.sinks import GroupSink, centred

from ..made import episode, step

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
