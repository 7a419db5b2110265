# SPDX-License-Identifier: Apache-2.0
"""Rollouts into a folder: continued where they were interrupted, every episode exactly once."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.errors import (
    AllFailed,
    NoEnvironment,
    OtherRollout,
    OutputUnwritable,
)
from openenvd.rollouts.policies.random_policy import action_schema
from openenvd.rollouts.run import RECORD, Report, RunConfig, claim_folder, roll_out
from openenvd.rollouts.stages.named_parts import importable

from .conftest import Serve, address_of
from .made import rows

POLICIES = """
import asyncio, pathlib
DONE = pathlib.Path(__file__).with_name("done")
def go(observation): return {"what": "go"}
def stumble(observation):
    bad = observation["episode"].endswith("3") and observation["step"] == 2
    return {"what": "raise" if bad else "go"}
def blunder(observation):
    return {"what": "nan" if observation["episode"].endswith("3") else "go"}
def leave(observation): return {"what": "leave"}
def fail(observation): raise OSError("no weights")
async def wait(observation): await asyncio.Event().wait()
async def late(observation):
    while observation["episode"].endswith("99") and not DONE.exists():
        await asyncio.sleep(0.01)
    return {"what": "go"}
"""


async def run(config: RunConfig, tmp_path: Path, **hooks: Any) -> dict[str, Any]:
    (tmp_path / "policies_here.py").write_text(POLICIES)
    with importable(tmp_path):
        return await roll_out(
            config,
            hooks.get("tell", lambda _: None),
            hooks.get("say", print),
            report_seconds=0.01,
        )


def order_of(address: str, tmp_path: Path, policy: str = "go", **more: Any) -> RunConfig:
    return RunConfig(
        environments={"walk": address},
        policy=f"policies_here:{policy}",
        folder=tmp_path / "out",
        **{"episodes": 20, "concurrency": 4, "retries": 0, **more},
    )


async def test_a_rollout_is_written_and_summarised(serve: Serve, tmp_path: Path) -> None:
    told: list[Any] = []
    hooks = {"tell": told.append}
    result = await run(order_of(address_of(serve()), tmp_path, seed=5), tmp_path, **hooks)
    assert told[-1].to_json()["done"] == 20  # the end is told, however short the rollout was
    assert (result["wanted"], result["earlier"], result["done"]) == (20, 0, 20)
    assert (result["steps"], result["mean_reward"]) == (100, 15.0)
    assert result["out"] == str(tmp_path / "out")
    assert result["lag"]["samples"] >= 0
    found = {row["episode_id"]: row for row in rows(tmp_path / "out")}
    assert sorted(found) == [f"{n:06d}" for n in range(20)]
    assert {row["seed"] for row in found.values()} == set(range(5, 25))
    assert len(rows(tmp_path / "out", "step")) == 100


async def test_rewards_of_complete_and_truncated_episodes_are_apart(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, episodes=2)
    result = await run(config, tmp_path)
    assert (result["mean_reward"], result["truncated_mean_reward"]) == (15.0, None)
    config = replace(config, folder=tmp_path / "short", max_steps=3)
    result = await run(config, tmp_path)
    assert (result["mean_reward"], result["truncated_mean_reward"]) == (None, 6.0)
    assert (result["truncated"], result["max_steps"]) == (2, 3)


async def test_rewards_that_are_no_numbers_are_counted_and_are_in_no_mean(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, "blunder")
    result = await run(config, tmp_path)
    assert (result["mean_reward"], result["odd_rewards"]) == (15.0, {"NaN": 10})
    assert result["episodes_with_odd_rewards"] == 2
    totals = {row["episode_id"]: row["total_reward"] for row in rows(config.folder)}
    assert {name for name, total in totals.items() if total is None} == {"000003", "000013"}


async def test_failed_episodes_are_reported_left_out_and_played_by_the_next_run(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, "stumble")
    seen: list[str] = []
    result = await run(config, tmp_path, say=seen.append)
    assert result["failures"] == {"environment_error": 2}
    assert "the floor is missing" in result["last_failures"]["environment_error"]
    assert (result["there"], result["kept_failed"]) == (18, False)
    assert {row["episode_id"] for row in rows(config.folder)} == {
        f"{n:06d}" for n in range(20) if n % 10 != 3
    }
    assert [line for line in seen if "failed at step 2: environment_error: " in line]
    assert (await run(config, tmp_path))["earlier"] == 18


async def test_failed_episodes_can_be_kept(serve: Serve, tmp_path: Path) -> None:
    config = order_of(address_of(serve()), tmp_path, "stumble", keep_failed=True)
    result = await run(config, tmp_path)
    assert (result["there"], result["failed"], result["kept_failed"]) == (20, 2, True)
    assert len(rows(config.folder)) == 20
    assert (await run(config, tmp_path))["earlier"] == 20


async def test_a_folder_of_another_rollout_is_refused(serve: Serve, tmp_path: Path) -> None:
    address = address_of(serve())
    await run(order_of(address, tmp_path, episodes=1), tmp_path)
    with pytest.raises(OtherRollout, match="different seed: None, not 7"):
        await run(order_of(address, tmp_path, seed=7), tmp_path)


def test_the_record_of_a_rollout_has_no_passwords(tmp_path: Path) -> None:
    def claim(policy: str) -> None:
        claim_folder(replace(order_of("http://127.0.0.1:1", tmp_path), policy=policy))

    claim("openai:http://me:hush@h/v1?api_key=hush")
    claim("openai:http://me:changed@h/v1?api_key=changed")  # it is continued
    written = (tmp_path / "out" / RECORD).read_text()
    assert "openai:http://***@h/v1?api_key=***" in written
    assert "hush" not in written
    with pytest.raises(OtherRollout, match="different policy"):
        claim("openai:http://other/v1")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    order = order_of("http://127.0.0.1:1", tmp_path)
    for folder, words, hint in (
        (tmp_path / "out", f"{tmp_path}/out is a file", "--out takes a folder, new or not"),
        (Path("/dev/full"), "/dev/full is a file", "--out takes a folder, new or not"),
        (Path("/proc/x"), "the folder /proc/x cannot be made", "write to another folder"),
    ):
        with pytest.raises(OutputUnwritable, match=words) as caught:
            claim_folder(replace(order, folder=folder))
        assert caught.value.hint == hint


async def test_a_rollout_ends_when_its_first_episodes_all_fail(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, "fail", episodes=1000)
    with pytest.raises(AllFailed, match=r"the first 16 episodes failed.*no weights"):
        await run(config, tmp_path)
    assert rows(config.folder) == []


async def test_a_small_rollout_of_which_all_fail_is_a_failure(serve: Serve, tmp_path: Path) -> None:
    said: list[str] = []
    order = order_of(address_of(serve()), tmp_path, "fail", episodes=3)
    place = f"OSError: no weights ({tmp_path / 'policies_here.py'}, line 11)"
    with pytest.raises(AllFailed, match=rf"all 3 episodes failed.*{re.escape(place)}"):
        await run(order, tmp_path, say=said.append)
    [traceback] = [text for text in said if "Traceback" in text]
    assert traceback.count("  File ") == 1
    assert 'raise OSError("no weights")' in traceback


async def test_sessions_that_end_with_their_process_name_the_cure(
    serve: Serve, tmp_path: Path
) -> None:
    order = order_of(address_of(serve()), tmp_path, "leave", episodes=3)
    with pytest.raises(AllFailed) as caught:
        await run(order, tmp_path)
    assert "openenv launch --isolate" in (caught.value.hint or "")


def test_a_random_policy_says_where_nothing_answers(unused_port: int) -> None:
    address = f"http://127.0.0.1:{unused_port}"
    with pytest.raises(NoEnvironment, match=rf"^nothing answers at {address}: .*refused"):
        action_schema(address)


async def test_an_endpoint_that_nobody_serves_is_named_with_what_to_do(
    serve: Serve, tmp_path: Path, unused_port: int
) -> None:
    config = replace(
        order_of(address_of(serve()), tmp_path, episodes=1),
        policy=f"openai:http://me:hush@127.0.0.1:{unused_port}/v1",
    )
    with pytest.raises(AllFailed) as caught:
        await run(config, tmp_path)
    where = f"http://127.0.0.1:{unused_port}/v1/chat/completions"
    assert "the only episode failed" in str(caught.value)
    assert f"{where} does not answer: ConnectError" in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "OPENAI_MODEL" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("keep_failed", "more"),
    [(False, "; run the same rollout again to play the missing episodes"), (True, "")],
)
async def test_an_environment_that_does_not_answer_is_named_with_what_to_do(
    tmp_path: Path, unused_port: int, keep_failed: bool, more: str
) -> None:
    address = f"http://127.0.0.1:{unused_port}"
    config = order_of(address, tmp_path, episodes=1, keep_failed=keep_failed)
    with pytest.raises(AllFailed, match="not_connected") as caught:
        await run(config, tmp_path)
    assert caught.value.hint == f"openenv status walk tells what happened{more}"


async def test_progress_is_reported_while_episodes_run(serve: Serve, tmp_path: Path) -> None:
    reports: list[str] = []

    def tell(report: Report) -> None:
        reports.append(report.message())
        assert report.to_json()["wanted"] == 200

    await run(order_of(address_of(serve()), tmp_path, episodes=200), tmp_path, tell=tell)
    assert all("/200 episodes" in text for text in reports)
    assert " steps/s" in reports[-1]
    await run(order_of(address_of(serve()), tmp_path, episodes=200), tmp_path, tell=tell)
    assert reports[-1] == "200/200 episodes"  # nothing is played: no rate
