# SPDX-License-Identifier: Apache-2.0
"""What the dashboard is shown of a folder of rollouts."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from openenvd.rollouts import replay
from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, Failure, FailureReason, Step
from openenvd.rollouts.folder.writer import RolloutWriter
from openenvd.rollouts.replay import MAX_STEPS, MAX_TEXT_BYTES, histogram, over_time

from ..made import episode
from .test_images import PNG, text_of

SCREEN = [[[x, y, 0] for x in range(10)] for y in range(10)]


def asked(folder: Path, show: str, **more: Any) -> Any:
    question = json.dumps({"folder": str(folder), "show": show, **more})
    command = [sys.executable, "-P", "-m", "openenvd.rollouts.replay", question]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return orjson.loads(done.stdout)  # as strict as a browser


async def write(folder: Path, steps: dict[str, list[Step]], **fields: Any) -> None:
    writing = await RolloutWriter.open(folder, buffer_bytes=1 << 26)
    async with writing as writer:
        for number, (episode_id, taken) in enumerate(steps.items()):
            for at, step in enumerate(taken):
                await writer.put_step(episode_id, at, step)
            told = {"reward": float(number), "finished_at": 10.0 + number, **fields}
            await writer.finish(episode(episode_id, **told))


def seen(observation: Any, **more: Any) -> Step:
    return Step.of(observation, {"move": 1}, 0.5, False, **more)


async def test_an_episode_is_shown_step_by_step_with_its_images(tmp_path: Path) -> None:
    camera = Array(bytes(300), "uint8", (10, 10, 3))
    taken = [seen({"pixels": text_of(PNG), "at": 0}), seen({"at": 1}, arrays={"camera": camera})]
    last = json.dumps({"screenshot": SCREEN}).encode()
    await write(tmp_path, {"000007": taken}, final_observation_json=last)

    answer = asked(tmp_path, "steps", episode="000007", first=0)

    first, second, end = answer["steps"]
    assert answer["next"] is None
    assert first["observation"]["value"] == {"pixels": "image/png, 3 x 2, 69 bytes", "at": 0}
    assert first["action"] == {"value": {"move": 1}}
    assert (first["reward"], first["done"]) == (0.5, False)
    [image] = first["images"]
    assert (image["place"], image["data"]) == ("pixels", text_of(PNG))
    assert [image["place"] for image in second["images"]] == ["camera"]
    assert second["arrays"] == [{"name": "camera", "dtype": "uint8", "shape": [10, 10, 3]}]
    assert [image["place"] for image in end["images"]] == ["screenshot"]
    assert (end["is_end"], end["number"]) == (True, 2)


async def test_a_long_episode_is_shown_in_several_answers(tmp_path: Path) -> None:
    count = MAX_STEPS * 2 + 3
    await write(tmp_path, {"000000": [seen({"at": at}) for at in range(count)]})
    numbers: list[int] = []
    first: int | None = 0
    while first is not None:
        answer = asked(tmp_path, "steps", episode="000000", first=first)
        numbers += [step["number"] for step in answer["steps"]]
        first = answer["next"]
    assert numbers == [*range(count), count]


async def test_of_a_large_observation_the_beginning_is_shown(tmp_path: Path) -> None:
    await write(tmp_path, {"000000": [seen({"text": "x" * 2 * MAX_TEXT_BYTES})]})
    [step, _] = asked(tmp_path, "steps", episode="000000", first=0)["steps"]
    told = step["observation"]
    assert told["bytes"] == 2 * MAX_TEXT_BYTES + len('{"text":""}')
    assert told["text"] == '{"text":"' + "x" * (MAX_TEXT_BYTES - 9)


async def test_images_beyond_what_a_step_may_have_are_told_without_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MAX_IMAGE_BYTES", 2 * len(PNG))
    taken = [seen({"cameras": [text_of(PNG)] * 3}), seen({"camera": text_of(PNG)})]
    await write(tmp_path, {"000000": taken})
    question = {"folder": str(tmp_path), "show": "steps", "episode": "000000", "first": 0}
    [first, second, _] = replay.answer_to(question)["steps"]
    assert [image["data"] for image in first["images"]] == [text_of(PNG)] * 2 + [None]
    assert first["images"][2]["bytes"] == len(PNG)
    assert [image["data"] for image in second["images"]] == [text_of(PNG)]


async def test_what_any_parser_reads_is_written_even_of_half_pairs_and_no_numbers(
    tmp_path: Path,
) -> None:
    observation = b'{"half": "\\ud83d!", "no number": [NaN, -Infinity, 1e999], "large": 1%s}'
    step = Step(observation % (b"0" * 30), b"{}", 0.0, True)
    await write(tmp_path, {"000000": [step]})
    [told, _] = asked(tmp_path, "steps", episode="000000", first=0)["steps"]
    value = told["observation"]["value"]
    assert value == {"half": "?!", "no number": [None, None, None], "large": 1e30}


async def test_episodes_are_listed_in_pages(tmp_path: Path) -> None:
    await write(tmp_path, {f"{number:06d}": [seen({})] for number in range(5)})
    answer = asked(tmp_path, "episodes", offset=3, limit=10)
    assert answer["total"] == 5
    told = [(row["episode_id"], row["total_reward"], row["steps"]) for row in answer["episodes"]]
    assert told == [("000003", 3.0, 1), ("000004", 4.0, 1)]


async def test_the_summary_counts_failures_apart_from_rewards(tmp_path: Path) -> None:
    writing = await RolloutWriter.open(tmp_path, buffer_bytes=1 << 26)
    failure = Failure(FailureReason.STEP_TIMED_OUT, "too slow")
    failed: dict[str, Any] = {"status": EpisodeStatus.FAILED, "failure": failure}
    async with writing as writer:
        made: list[Episode] = [episode("000000", reward=1.0), episode("000001", reward=3.0)]
        for one in [*made, episode("000002", reward=-100.0, **failed)]:
            await writer.finish(one)
    answer = asked(tmp_path, "summary")
    assert answer["statuses"] == {"done": 2, "failed": 1}
    assert answer["failures"] == {"step_timed_out": 1}
    assert (answer["histogram"]["least"], answer["histogram"]["most"]) == (1.0, 3.0)
    assert sum(answer["histogram"]["counts"]) == 2


async def test_the_summary_shows_rewards_of_complete_episodes_that_are_numbers(
    tmp_path: Path,
) -> None:
    cut: dict[str, Any] = {"status": EpisodeStatus.TRUNCATED}
    made = [episode("000000", reward=1.0), episode("000001", reward=math.nan)]
    async with await RolloutWriter.open(tmp_path, buffer_bytes=1 << 26) as writer:
        await writer.finish(episode("000002", reward=-100.0, **cut))
        await writer._commit_all()
        assert asked(tmp_path, "summary")["histogram"]["mean"] == -100.0
        for one in made:
            await writer.finish(one)
    answer = asked(tmp_path, "summary")
    assert (answer["rewards_of"], answer["histogram"]["mean"]) == ("done", 1.0)
    assert sum(answer["histogram"]["counts"]) == 1
    assert answer["episodes_with_odd_rewards"] == 1


def test_every_value_is_in_one_span_of_the_histogram() -> None:
    assert histogram([]) is None
    same = histogram([1.0] * 49)
    assert same is not None
    assert (same["counts"], same["mean"]) == ([49], 1.0)
    found = histogram([0.0, 1.0, 1.0, 24.0])
    assert found is not None
    assert (found["counts"][0], found["counts"][1], found["counts"][-1]) == (1, 2, 1)
    greatest = histogram([1.5e308, 1.5e308, -1.5e308])
    assert greatest is not None
    assert (greatest["counts"][0], greatest["counts"][-1], greatest["mean"]) == (1, 2, 5e307)


def test_rewards_over_time_are_told_by_span() -> None:
    assert over_time([]) == []
    spans = over_time([(0.0, 1.0), (0.5, 3.0), (60.0, 5.0)])
    told = [(span["mean"], span["least"], span["most"], span["episodes"]) for span in spans]
    assert told == [(2.0, 1.0, 3.0, 2), (5.0, 5.0, 5.0, 1)]


async def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    assert "has no rollouts" in asked(tmp_path / "none", "summary")["error"]["message"]
    await write(tmp_path, {"000000": [seen({})]})
    answer = asked(tmp_path, "steps", episode="../../etc/passwd", first=0)
    assert "has no episode" in answer["error"]["message"]
