# SPDX-License-Identifier: Apache-2.0
"""Rollouts into a folder with stages: groups begin alike, are weighed, and are there as a whole."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.errors import AllFailed, OtherRollout, StageNotFound
from openenvd.rollouts.folder.writer import RolloutWriter
from openenvd.rollouts.run import RunConfig
from openenvd.rollouts.stages.named_parts import Stages
from openenvd.rollouts.stages.sinks import group_normalised, leave_one_out

from ..conftest import Serve, address_of
from ..made import episode, rows
from ..test_run import order_of as order_of_plain_rollout
from ..test_run import run as run_plainly

STAGES = """
calls = 0
def varied(observation, turn):
    "The longer, the larger its number in the group: 1 to 4 steps."
    bad = observation["step"] > int(turn.episode_id) % 4
    return {"what": "raise" if bad else "go"}
def stumble(observation, turn):
    return {"what": "raise" if turn.episode_id == "000005" else "go"}
def stumble_everywhere(observation, turn):
    return {"what": "raise" if int(turn.episode_id) % 4 == 1 else "go"}
def go(observation): return {"what": "go"}
def odd(group): return [int(one.episode.id) % 2 == 1 for one in group]
"""


async def run(config: RunConfig, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "stages_here.py").write_text(STAGES)
    return await run_plainly(config, tmp_path)


def order_of(address: str, tmp_path: Path, policy: str = "go", **more: Any) -> RunConfig:
    grouped = {"episodes": 12, "concurrency": 3, "stages": Stages(4), **more}
    plain = order_of_plain_rollout(address, tmp_path, **grouped)
    return replace(plain, policy=f"stages_here:{policy}")


def by_id(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["episode_id"]: row for row in sorted(rows(folder), key=lambda r: r["episode_id"])}


@pytest.mark.parametrize(
    ("name", "function"),
    [("group-normalised", group_normalised), ("leave-one-out", leave_one_out)],
)
async def test_each_episode_has_its_advantage_among_those_that_began_alike(
    serve: Serve, tmp_path: Path, name: str, function: Any
) -> None:
    stages = Stages(4, name)
    address = address_of(serve())
    config = order_of(address, tmp_path, "varied", seed=7, keep_failed=True, stages=stages)
    result = await run(replace(config, max_steps=3), tmp_path)
    found = by_id(config.folder)
    assert (result["there"], len(found)) == (12, 12)
    assert [row["seed"] for row in found.values()] == [7] * 4 + [8] * 4 + [9] * 4
    rewards = [1.0, 3.0, 6.0, 6.0]
    assert [row["total_reward"] for row in found.values()] == rewards * 3
    assert [row["advantage"] for row in found.values()] == pytest.approx(function(rewards) * 3)


async def test_a_group_plays_at_one_environment(serve: Serve, tmp_path: Path) -> None:
    addresses = {name: address_of(serve()) for name in ("a", "b")}
    config = replace(order_of("", tmp_path, "go"), environments=addresses)
    await run(config, tmp_path)
    played = [row["environment"] for row in by_id(config.folder).values()]
    first, second = addresses.values()
    assert played == [first] * 4 + [second] * 4 + [first] * 4


async def test_a_group_with_a_failed_episode_is_played_again_as_a_whole(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, "stumble")
    result = await run(config, tmp_path)
    assert (result["failed"], result["left_out"], result["there"]) == (1, 3, 8)
    assert list(by_id(config.folder)) == [f"{n:06}" for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    again = await run(config, tmp_path)
    assert (again["earlier"], again["episodes"]) == (8, 4)


async def test_a_rollout_of_which_no_group_is_whole_is_a_failure(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, "stumble_everywhere")
    with pytest.raises(AllFailed, match="3 of 12 episodes failed, at least one of each group"):
        await run(config, tmp_path)


async def test_failed_episodes_may_be_dropped_from_their_group_and_are_not_played_again(
    serve: Serve, tmp_path: Path
) -> None:
    stages = Stages(4, filters=("failed",))
    config = order_of(address_of(serve()), tmp_path, "stumble", stages=stages)
    result = await run(config, tmp_path)
    assert (result["there"], result["filtered"]) == (12, {"failed": 1})
    found = by_id(config.folder)
    assert (found["000005"]["filtered"], found["000005"]["advantage"]) == ("failed", None)
    assert found["000004"]["advantage"] == 0.0
    assert (await run(config, tmp_path))["earlier"] == 12


async def test_filters_without_groups_look_at_each_episode_by_itself(
    serve: Serve, tmp_path: Path
) -> None:
    stages = Stages(filters=("min-steps=3", "max-reward=9", "stages_here:odd"))
    config = order_of(address_of(serve()), tmp_path, "varied", keep_failed=True, stages=stages)
    result = await run(replace(config, max_steps=3), tmp_path)
    dropped = Counter(row["filtered"] for row in by_id(config.folder).values())
    assert dropped == {"min-steps=3": 6, "stages_here:odd": 3, None: 3}
    assert result["filtered"] == {"min-steps=3": 6, "stages_here:odd": 3}
    assert {row["advantage"] for row in by_id(config.folder).values()} == {None}


@pytest.mark.parametrize(
    "stages", [Stages(4, "stages_here:nothing"), Stages(filters=("nowhere:f",))]
)
async def test_an_unknown_stage_is_refused_before_anything_is_written(
    serve: Serve, tmp_path: Path, stages: Stages
) -> None:
    config = order_of(address_of(serve()), tmp_path, stages=stages)
    with pytest.raises(StageNotFound, match=r"the stage '.*' cannot be imported"):
        await run(config, tmp_path)
    assert not config.folder.exists()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Stages(2), "different group: 4, not 2"),
        (Stages(), "different group: 4, not None"),
        (Stages(4, "centred"), "different advantages: 'group-normalised', not 'centred'"),
        (Stages(4, filters=("failed",)), r"different filters: \[\], not \['failed'\]"),
    ],
)
async def test_a_rollout_is_not_continued_with_other_stages(
    serve: Serve, tmp_path: Path, other: Stages, expected: str
) -> None:
    config = order_of(address_of(serve()), tmp_path)
    await run(config, tmp_path)
    with pytest.raises(OtherRollout, match=expected):
        await run(replace(config, stages=other), tmp_path)


async def test_a_group_of_which_a_part_is_there_is_played_again_as_a_whole(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path)
    async with await RolloutWriter.open(config.folder) as writer:
        await writer.put(episode("000006"))
    result = await run(config, tmp_path)
    assert (result["earlier"], result["there"]) == (0, config.episodes)
    [_, told] = result["damaged"]  # the record is made again
    assert told.startswith("packs/00000.jsonl has a part of a group; it is damaged/")
    assert Counter(row["episode_id"] for row in rows(config.folder)) == Counter(
        f"{number:06d}" for number in range(config.episodes)
    )
