# SPDX-License-Identifier: Apache-2.0
"""Groups on disk: all of a group or nothing of it, whatever crashes, fails, or is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.episodes import Episode
from openenvd.rollouts.errors import EpisodeRefused, OutputFull
from openenvd.rollouts.folder import manifest
from openenvd.rollouts.folder.layout import SPOOL, Verdict
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.spool import OWN_PART_BYTES
from openenvd.rollouts.folder.writer import RolloutWriter
from openenvd.rollouts.stages.advantages import centred
from openenvd.rollouts.stages.grouping import GroupSink

from .made import episode, image, names, step
from .test_output import DiesAt, Full, crash

GROUPS = {"a": (400, 400), "b": (400, OWN_PART_BYTES), "c": (400, 400), "d": (10, 10)}


def some_groups(output: Output) -> None:
    """Small ones, one with a member that would have been a part of its own, a part that ends."""
    for name, sizes in GROUPS.items():
        ids = [f"{name}{number}" for number in range(len(sizes))]
        if not output.finished_episode_ids.issuperset(ids):
            for one, size in zip(ids, sizes, strict=True):
                output.put_step(one, 0, step(text="x" * size, arrays={"image": image(7)}))
            output.finish_together([(episode(one), Verdict(0.5)) for one in ids])
        if name != "c":
            output.checkpoint()
    output.close()


def whole_groups(ids: Sequence[str]) -> bool:
    return all((f"{name}0" in ids) == (f"{name}1" in ids) for name in GROUPS)


@pytest.mark.parametrize("at", range(0, 132, 3))
def test_a_crash_at_any_point_leaves_whole_groups(tmp_path: Path, at: int) -> None:
    """And a second crash while the first is mended."""
    crash(tmp_path, some_groups, DiesAt(at))
    assert whole_groups(sorted(manifest.read(tmp_path).episode_ids()))
    crash(tmp_path, some_groups, DiesAt(at // 3))
    output = Output(tmp_path)
    assert whole_groups(sorted(output.finished_episode_ids))
    some_groups(output)
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert sorted(e.id for e in rollouts) == [f"{name}{n}" for name in GROUPS for n in range(2)]
    assert all(e.row["advantage"] == 0.5 and len(list(e.steps())) == 1 for e in rollouts)


def test_a_group_that_does_not_fit_on_the_disk_is_not_there(tmp_path: Path) -> None:
    disk = Full(20_000)
    output = Output(tmp_path, disk=disk)
    output.put_step("a", 0, step())
    output.finish(episode("a"))
    output.put_step("b0", 0, step())
    output.put_step("b1", 0, step(text="x" * 20_000))
    with pytest.raises(OutputFull):
        output.finish_together([(episode("b0"), Verdict()), (episode("b1"), Verdict())])
    disk.room_bytes = 10_000  # freed by forgetting the half
    output.save()
    output.release()
    with Output(tmp_path) as again:
        assert again.finished_episode_ids == {"a"}
        again.close()
    open_rollouts(tmp_path).verify()


def test_a_refused_episode_refuses_its_group(tmp_path: Path) -> None:
    with Output(tmp_path) as output:
        output.put_step("a", 0, step())
        output.put_step("b", 1, step())
        with pytest.raises(EpisodeRefused, match="episode b is not whole"):
            output.finish_together([(episode("a"), Verdict()), (episode("b"), Verdict())])
        output.finish(episode("c"))
        output.close()
    assert open_rollouts(tmp_path).episode_ids() == ["c"]


async def play(sink: GroupSink, number: int, **fields: Any) -> Episode:
    """An episode of one step; what it saw last is large."""
    one = episode(f"{number:06}", reward=float(number), **fields)
    await sink.put_step(one.id, 0, step(), await sink.reserve(1))
    return one


def large(number: int) -> bytes:
    return b'"' + str(number).encode() * 5000 + b'"'


async def test_last_observations_wait_for_their_group_on_disk_and_are_written_unchanged(
    tmp_path: Path,
) -> None:
    sink = GroupSink(await RolloutWriter.open(tmp_path), 3, advantages=centred)
    spool = tmp_path / SPOOL
    for number in range(3):
        await sink.finish(await play(sink, number, final_observation_json=large(number)))
        kept = [
            one.episode.final_observation_json for ones in sink._waiting.values() for one in ones
        ]
        assert kept == [b"null"] * ((number + 1) % 3)
        assert len(list(spool.glob("*.last"))) == (number + 1) % 3
    await sink.close()
    found = list(open_rollouts(tmp_path))
    assert [e.row["final_observation"] for e in found] == [str(n) * 5000 for n in range(3)]
    assert [e.row["advantage"] for e in found] == [-1.0, 0.0, 1.0]


async def test_a_filter_sees_the_last_observation_of_an_episode(tmp_path: Path) -> None:
    def second(group: Sequence[Any]) -> list[bool]:
        return [one.episode.final_observation == "1" * 5000 for one in group]

    writer = await RolloutWriter.open(tmp_path)
    sink = GroupSink(writer, 2, filters={"second": second}, advantages=None)
    for number in range(2):
        await sink.finish(await play(sink, number, final_observation_json=large(number)))
    await sink.close()
    rows = [e.row for e in open_rollouts(tmp_path)]
    assert [(row["filtered"], row["advantage"]) for row in rows] == [(None, None), ("second", None)]
    assert (sink.counts.written, sink.counts.filtered) == (2, {"second": 1})


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_a_group_with_a_failed_episode_is_not_written(tmp_path: Path, failing: int) -> None:
    sink = GroupSink(await RolloutWriter.open(tmp_path), 3)
    for number in range(6):
        one = await play(sink, number, final_observation_json=large(number))
        await (sink.leave_out(one) if number == failing else sink.finish(one))
    assert (sink.counts.written, sink.counts.left_out) == (3, 2)
    await sink.close()
    assert open_rollouts(tmp_path).episode_ids() == ["000003", "000004", "000005"]
    assert names(tmp_path / SPOOL) == []


async def test_groups_that_end_at_once_are_each_whole(tmp_path: Path) -> None:
    sink = GroupSink(await RolloutWriter.open(tmp_path), 4, advantages=centred)
    order = [number * 7 % 64 for number in range(64)]  # as they may finish
    ended = [await play(sink, n, final_observation_json=large(n)) for n in order]
    await asyncio.gather(*(sink.finish(one) for one in ended))
    await sink.close()
    found = {e.id: e.row for e in open_rollouts(tmp_path)}
    assert [found[f"{n:06}"]["advantage"] for n in range(64)] == [-1.5, -0.5, 0.5, 1.5] * 16
