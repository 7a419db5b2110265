# SPDX-License-Identifier: Apache-2.0
"""Trees of episodes at a real env host: their shape, their files, their groups, their damage."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import Episode, FailureReason
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.policies.policy import Decision, Turn
from openenvd.rollouts.run import Report, RunConfig, roll_out
from openenvd.rollouts.stages.named_parts import Stages
from openenvd.rollouts.trees import Tree
from openenvd.server.operations.rollout import RolloutPayload

from .conftest import Serve, address_of
from .made import rows

SHAPE = "width=2,depth=2"  # with 5 steps of `Walk` and the default, branches before steps 1 and 2


def note(observation: dict[str, Any], turn: Turn) -> Decision:
    """An action whose size shows the branch."""
    return Decision({"what": "go", "size": turn.branch}, {"of": turn.episode_id})


async def collected(collector: RolloutCollector, trees: int) -> dict[str, Episode]:
    found: dict[str, Episode] = {}
    async for batch in collector.batches(64, episodes=trees):
        found |= {episode.id: episode for episode in batch}
    return found


@pytest.mark.parametrize("world", ["Walk", "Locked"])  # copied by the server, and replayed
async def test_a_tree_is_played_with_each_prefix_once(serve: Serve, world: str) -> None:
    host = serve(world)
    collector = RolloutCollector(
        address_of(host), note, concurrency=8, max_steps=5, seed=3, tree=SHAPE
    )
    found = await collected(collector, 2)
    of_first = {name: each for name, each in found.items() if name.startswith("000000")}
    assert sorted(of_first) == ["000000", "000000.1", "000000.1.1", "000000.2"]
    assert len(found) == 8
    shape = {name: (each.parent, each.branched_at) for name, each in of_first.items()}
    assert shape == {
        "000000": (None, None),
        "000000.1": ("000000", 1),
        "000000.1.1": ("000000.1", 2),
        "000000.2": ("000000", 2),
    }
    for episode in found.values():
        own = range(episode.branched_at or 0, 5)
        assert [step.observation["step"] for step in episode.steps] == list(own)
        assert episode.steps[0].action["size"] == (0 if episode.parent is None else 1)
        assert {step.info["of"] for step in episode.steps} == {episode.id}
        assert (episode.total_reward, episode.status) == (15, "done")
        assert episode.seed == 3 + int(episode.id[:6])
    assert (collector.stats.trees, collector.stats.episodes) == (2, 8)
    assert collector.stats.steps == 2 * (5 + 4 + 3 + 3)


async def test_a_policy_branches_where_it_wants_within_the_trees_leaves(serve: Serve) -> None:
    def at_three(observation: dict[str, Any], turn: Turn) -> Decision:
        return Decision({"what": "go"}, branch=9 if turn.number == 3 else 1)

    address = address_of(serve("Walk"))
    collector = RolloutCollector(address, at_three, concurrency=4, max_steps=5, seed=1, tree=SHAPE)
    found = await collected(collector, 1)
    assert {each.branched_at for each in found.values()} == {None, 3}
    assert len(found) == 4
    collector = RolloutCollector(address, at_three, concurrency=4, retries=0)
    (episode,) = (await collected(collector, 1)).values()
    assert episode.failure is not None
    assert "no --tree" in episode.failure.message


async def test_a_branch_has_a_copy_of_its_policys_memory(serve: Serve) -> None:
    class Remembering:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __call__(self, observation: dict[str, Any]) -> Decision:
            self.seen.append(observation["step"])
            return Decision({"what": "go"}, {"seen": self.seen.copy()})

    collector = RolloutCollector(
        address_of(serve("Walk")), Remembering, concurrency=4, max_steps=5, seed=1, tree=SHAPE
    )
    for episode in (await collected(collector, 1)).values():
        assert episode.steps[-1].info["seen"] == [0, 1, 2, 3, 4]


async def test_a_tree_fails_as_a_whole_and_leaves_no_session(serve: Serve) -> None:
    host = serve("Walk")

    def breaking(observation: dict[str, Any], turn: Turn) -> dict[str, Any]:
        return {"what": "raise" if turn.episode_id == "000000.2" else "go"}

    collector = RolloutCollector(
        address_of(host), breaking, concurrency=4, max_steps=5, seed=1, tree=SHAPE, retries=1
    )
    found = await collected(collector, 1)
    assert found.keys() == {"000000", "000000.2"}  # the first branch that is played
    failure = found["000000.2"].failure
    assert failure is not None
    assert failure.reason is FailureReason.ENVIRONMENT_ERROR
    assert found["000000"].failure is None
    assert collector.stats.retried.total() == 1
    host.emptied()


async def test_an_environment_that_a_seed_does_not_repeat_is_refused(serve: Serve) -> None:
    def count(observation: dict[str, Any]) -> dict[str, Any]:
        return {"what": "count"}

    collector = RolloutCollector(
        address_of(serve("Counting")), count, concurrency=4, max_steps=5, seed=1, tree=SHAPE
    )
    failure = (await collected(collector, 1))["000000.2"].failure
    assert failure is not None
    assert failure.reason is FailureReason.BRANCH_FAILED
    assert collector.stats.retried.total() == 0


def config(folder: Path, address: str, **more: Any) -> RunConfig:
    return RunConfig(
        **{
            "environments": {"world": address},
            "policy": f"{note.__module__}:note",
            "folder": folder,
            "episodes": 3,
            "max_steps": 5,
            "seed": 1,
            "tree": SHAPE,
            "stages": Stages(1),
            **more,
        }
    )


async def test_a_folder_has_each_tree_once_as_a_group_and_replays_a_damaged_one(
    serve: Serve, tmp_path: Path
) -> None:
    host, folder = serve("Walk"), tmp_path / "out"
    reports: list[Report] = []
    result = await roll_out(config(folder, address_of(host)), reports.append)
    assert (result["there"], result["episodes"], result["written"]) == (3, 12, 3)
    assert reports[-1].message().startswith("3/3 trees, 12 episodes, ")
    assert len(rows(folder, "step")) == result["steps"] == 3 * 15
    ends = {row["episode_id"]: row for row in rows(folder)}
    assert len(ends) == 12
    assert all(row["advantage"] == 0 for row in ends.values())
    assert ends["000002.1.1"]["parent"] == "000002.1"
    assert ends["000002.1.1"]["branched_at"] == 2
    assert ends["000002.1.1"]["steps"] == 5
    rollouts = open_rollouts(folder)
    rollouts.verify()
    for episode in rollouts:
        sent = pickle.loads(pickle.dumps(episode))  # as to another process
        assert [step.number for step in sent.steps()] == [0, 1, 2, 3, 4]
    again = await roll_out(config(folder, address_of(host)), lambda _: None)
    assert (again["earlier"], again["steps"]) == (3, 0)

    (pack,) = (folder / "packs").glob("*.jsonl")
    lines = pack.read_bytes().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b'"000001.1"' in line)
    lines[at] = lines[at].replace(b'"go"', b'"og"') if b'"go"' in lines[at] else b"{}\n"
    pack.write_bytes(b"".join(lines))
    again = await roll_out(config(folder, address_of(host)), lambda _: None)
    assert (again["earlier"], again["there"], again["steps"]) == (2, 3, 15)
    assert len(rows(folder)) == 12
    open_rollouts(folder).verify()


async def test_a_dropped_episode_keeps_the_steps_that_its_branches_need(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dropping.py").write_text(
        "def first(group):\n    return ['.' not in one.episode.id for one in group]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "out"
    stages = Stages(1, filters=("dropping:first",))
    await roll_out(config(folder, address_of(serve("Walk")), stages=stages), lambda _: None)
    for episode in open_rollouts(folder):
        is_dropped = "." not in episode.id
        assert (episode.row["filtered"] is not None) == is_dropped
        assert len(list(episode.steps())) == 5


def test_a_shape_is_read_and_checked() -> None:
    assert Tree.parse("width=4,depth=3") == Tree(4, 3)
    assert Tree.parse("depth=3,width=4,every=2").leaves == 64
    for wrong in ("4,3", "width=4", "width=1,depth=2", "width=2,depth=0", "width=2,depth=x", ""):
        with pytest.raises(ValueError, match="a tree"):
            Tree.parse(wrong)
    branching = [step for step in range(50) if Tree(4, 3).width_at(step, 50) > 1]
    assert branching == [12, 24, 36]
    with pytest.raises(ValidationError, match="a tree is width=4"):
        RolloutPayload(name="echo", out="/out", tree="4,3")
    payload = RolloutPayload(
        name="echo",
        out="/out",
        tree="width=4,depth=3",
        advantages="centred",
        filters=["zero-advantage"],
    )
    run = payload.run_config({}, {})
    assert (run.stages.size, run.seed, run.tree) == (1, 0, "width=4,depth=3")
