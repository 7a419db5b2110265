# SPDX-License-Identifier: Apache-2.0
"""Rollouts whose daemon or worker is killed: every episode is in the folder exactly once."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from openenvd.rollouts.folder.readers import episodes_in

from ..conftest import Machine, eventually, free_port
from ..replicas.test_updates import VERSIONED

EPISODES = 60
CALLS = 150  # of a policy until its worker has to wait; 15 episodes
POLICIES = """
import asyncio, os

calls = 0
async def halfway():
    global calls
    calls += 1
    while calls > %(calls)d and os.path.exists("%(stay)s"):
        await asyncio.sleep(0.02)

async def slowly(observation):
    await asyncio.sleep(0.02)
    await halfway()
    return {"message": "hello"}

async def variedly(observation, turn):
    await halfway()
    return {"message": "x" * (int(turn.episode_id) * 7 %% 11)}
"""


def write_policies(folder: Path) -> None:
    code = POLICIES % {"stay": folder / "stay", "calls": CALLS}
    (folder / "policies.py").write_text(code)


def begin(machine: Machine, policy: str = "slowly", *more: str) -> str:
    """Begin a rollout that plays some episodes, and the others after `go_on`; returns its id."""
    folder = machine.home.parent
    (folder / "stay").touch()
    write_policies(folder)
    machine.ok("launch", "echo")
    return queue(machine, policy, *more)


def go_on(machine: Machine) -> None:
    (machine.home.parent / "stay").unlink()


def queue(machine: Machine, policy: str, *more: str) -> str:
    arguments = ["--episodes", str(EPISODES), "--concurrency", "4", "--max-steps", "10"]
    named = ["--policy", f"policies:{policy}", "--out", "out", "--async"]
    return machine.ok("rollout", "echo", *arguments, *named, *more).out.strip()


def again(machine: Machine, policy: str = "slowly", *more: str) -> Any:
    arguments = ["--episodes", str(EPISODES), "--max-steps", "10", "--json"]
    named = ["--policy", f"policies:{policy}", "--out", "out"]
    return machine.ok("rollout", "echo", *arguments, *named, *more).json["rollout"]


def rows_of(machine: Machine, kind: str) -> list[dict[str, Any]]:
    files = out_of(machine).glob("[ep]*/**/*.jsonl")
    rows = (json.loads(line) for file in files for line in file.read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def episode_rows(machine: Machine) -> dict[str, dict[str, Any]]:
    return {row["episode_id"]: row["episode"] for row in rows_of(machine, "end")}


def recorded_ids(machine: Machine) -> set[str]:
    return set(episodes_in(out_of(machine)))


def out_of(machine: Machine) -> Path:
    return machine.home.parent / "out"


def recorded(machine: Machine) -> int:
    return len(recorded_ids(machine))


def worker_of(machine: Machine) -> psutil.Process:
    workers = machine.ok("info", "--json").json["workers"]
    (pid,) = [worker["pid"] for worker in workers if worker["label"] == "rollout echo"]
    return psutil.Process(pid)


def every_episode_is_there_once(machine: Machine) -> None:
    counted = Counter(row["episode_id"] for row in rows_of(machine, "end"))
    assert counted == Counter(f"{number:06d}" for number in range(EPISODES))
    steps = rows_of(machine, "step")
    assert Counter((s["episode_id"], s["step"]) for s in steps) == Counter(
        (f"{number:06d}", step) for number in range(EPISODES) for step in range(10)
    )


def test_the_next_daemon_continues_a_killed_ones_rollout(machine: Machine) -> None:
    request_id = begin(machine)
    eventually(lambda: recorded(machine) > 0)
    machine.kill_daemon()
    go_on(machine)
    machine.ok("up")
    machine.ok("wait", request_id)
    request = machine.request(request_id)
    assert (request["state"], request["attempts"]) == ("SUCCEEDED", 1)
    assert request["lost_daemons"] == 1
    assert request["result"]["earlier"] > 0
    every_episode_is_there_once(machine)


def test_groups_are_whole_after_each_kill_and_have_the_advantages_of_their_members(
    machine: Machine,
) -> None:
    stages = ("--group", "4", "--advantages", "leave-one-out")
    for queued in (begin, queue, queue):
        before = recorded(machine)
        request_id = queued(machine, "variedly", *stages)
        eventually(lambda before=before: recorded(machine) > before)  # type: ignore[misc]
        worker_of(machine).kill()
        machine.run("wait", request_id)
        groups = Counter(int(found) // 4 for found in recorded_ids(machine))
        assert set(groups.values()) == {4}
    go_on(machine)
    assert again(machine, "variedly", *stages)["there"] == EPISODES
    every_episode_is_there_once(machine)
    rows = episode_rows(machine)
    for first in range(0, EPISODES, 4):
        members = [rows[f"{number:06d}"] for number in range(first, first + 4)]
        rewards = [row["total_reward"] for row in members]
        others = [(sum(rewards) - reward) / 3 for reward in rewards]
        expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
        assert [row["advantage"] for row in members] == pytest.approx(expected)
        assert {row["seed"] for row in members} == {first // 4}


def test_a_rollout_never_plays_in_another_environment_at_its_address(machine: Machine) -> None:
    """Otherwise its episodes would be recorded as those of an environment that was taken down."""
    write_policies(machine.home.parent)
    port = str(free_port())
    machine.ok("launch", "echo", "--name", "trained", "--shards", "1", "--port", port)
    arguments = ["--episodes", "800", "--concurrency", "4", "--max-steps", "10", "--out", "out"]
    begun = machine.ok("rollout", "trained", *arguments, "--policy", "policies:slowly", "--async")
    eventually(lambda: recorded_ids(machine))
    address = machine.environment("trained")["address"]
    machine.ok("down", "trained")
    machine.ok("launch", "echo", "--name", "impostor", "--shards", "1", "--port", port)
    request_id = begun.out.strip()
    assert machine.run("wait", request_id).code != 0
    assert "trained was taken down" in machine.request(request_id)["error"]["message"]
    with urlopen(f"{address}/capacity", timeout=10) as answer:
        shards = json.load(answer)["shards"]
    assert [shard["totals"]["steps"] for shard in shards] == [0]


@pytest.mark.parametrize("ends", [False, True], ids=["it is drained", "its time is over"])
def test_a_rollout_stays_with_the_generation_that_it_began_with(
    machine: Machine, write_environment: Callable[[str], str], ends: bool
) -> None:
    """Otherwise the folder would mix episodes of the code before and after an update."""
    folder = machine.home.parent
    write_policies(folder)
    words = ("launch", write_environment(VERSIONED), "--name", "trial")
    machine.ok(*words, "-e", "VERSION=old")
    count = "4000" if ends else "40"
    more = ["--episodes", count, "--concurrency", "4", "--max-steps", "10", "--out", "out"]
    begun = machine.ok("rollout", "trial", *more, "--policy", "policies:slowly", "--async")
    eventually(lambda: recorded_ids(machine))
    limit = ["--set", "drain-timeout=0.5" if ends else "drain-timeout=60"]
    machine.ok(*words, "-e", "VERSION=new", *limit)
    request_id = begun.out.strip()
    ended = machine.run("wait", request_id)
    if ends:
        assert "trial was updated before" in machine.request(request_id)["error"]["message"]
    else:
        assert ended.code == 0, ended.text
    texts = "".join(path.read_text() for path in (folder / "out").rglob("*.jsonl"))
    assert '"old"' in texts
    assert '"new"' not in texts
