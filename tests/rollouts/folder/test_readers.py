# SPDX-License-Identifier: Apache-2.0
"""What was written is read back, also while it is written, packed, or after it was damaged."""

import math
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from openenvd.rollouts.episodes import Array, Step
from openenvd.rollouts.errors import OutputDamaged
from openenvd.rollouts.folder.readers import Rollouts, open_rollouts
from openenvd.rollouts.folder.rows import LARGE_BYTES
from openenvd.rollouts.folder.writer import CHUNK_BYTES, RolloutWriter

from ..made import episode, finish, image, names, step, written

ABC = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2]}


async def write(folder: Path) -> None:
    """Three episodes, with arrays of several kinds; the last is large."""
    async with await RolloutWriter.open(folder) as writer:
        for which, name in enumerate("abc"):
            for number in range(3):
                experts = np.arange(24, dtype="<i2").reshape(2, 3, 4) + number + 10 * which
                arrays = {
                    "image": image(number, 77),
                    "experts": Array(experts.tobytes(), "<i2", experts.shape),
                    "large": image(number, 300_000),
                }
                text = "x" * (LARGE_BYTES // 3 if name == "c" else 10)
                await writer.put_step(name, number, step(number, text, arrays, note=name))
            await writer.finish(episode(name, final_observation_json=b'{"end":true}'))


def seen(rollouts: Rollouts) -> dict[str, list[int]]:
    return {found.id: [row.observation["number"] for row in found.steps()] for found in rollouts}


async def test_everything_written_is_read_back_also_by_threads(tmp_path: Path) -> None:
    await write(tmp_path)
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    for which, name in enumerate("abc"):
        found = rollouts.episode(name)
        assert found.final_observation == {"end": True}
        assert (found.row["steps"], found.row["total_reward"]) == (3, 1.0)
        for number, row in enumerate(found.steps()):
            assert (row.number, row.reward, row.action) == (number, float(number), {"move": number})
            assert (row.observation["number"], row.info) == (number, {"note": name})
            experts = row.arrays["experts"].numpy()
            assert (experts.shape, experts.dtype) == ((2, 3, 4), np.dtype("<i2"))
            assert experts[0, 0, 0] == number + 10 * which
            assert set(row.arrays["image"].numpy()) == {number}
            assert bytes(row.arrays["large"].data) == bytes([number]) * 300_000
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(seen, [rollouts] * 8)) == [ABC] * 8


async def test_arrays_without_elements_or_dimensions_are_numpys(tmp_path: Path) -> None:
    made = {"none": Array(b"", "<f4", (0, 3)), "one": Array(b"\x00\x00\x80\x3f", "<f4", ())}
    async with await RolloutWriter.open(tmp_path) as writer:
        await writer.put_step("a", 0, step(arrays=made))
        await writer.finish(episode("a"))
    [row] = open_rollouts(tmp_path).episode("a").steps()
    assert row.arrays["none"].numpy().shape == (0, 3)
    assert row.arrays["one"].numpy() == np.float32(1)


async def test_a_folder_without_rollouts_is_an_error_and_an_empty_one_has_none(
    tmp_path: Path,
) -> None:
    with pytest.raises(OutputDamaged, match="no rollouts"):
        open_rollouts(tmp_path)
    await (await RolloutWriter.open(tmp_path)).close()
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert (len(rollouts), list(rollouts)) == (0, [])
    with pytest.raises(KeyError):
        rollouts.episode("z")


async def test_an_episode_without_steps_beside_others_has_none(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await writer.finish(episode("a"))
        await finish(writer, "b", steps=2)
    assert seen(open_rollouts(tmp_path)) == {"a": [], "b": [0, 1]}


@pytest.mark.parametrize("text", ["small", "x" * CHUNK_BYTES])
async def test_a_reader_goes_on_when_files_go_into_a_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """With what it had listed before, and an episode that it had got."""
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 2)
    writer = await RolloutWriter.open(tmp_path)
    for name in "abc":
        await finish(writer, name, text=text)
        await writer._commit_all()
    early = open_rollouts(tmp_path)
    got = early.episode("b")
    steps = got.steps()
    next(steps)
    await writer.close()
    assert len(names(tmp_path)) == 1
    assert [row.number for row in steps] == [1, 2]
    assert [row.number for row in got.steps()] == [0, 1, 2]
    assert got.final_observation is None
    assert seen(early) == ABC
    assert seen(open_rollouts(tmp_path)) == ABC


@pytest.mark.parametrize("first", ["observation", "reward"])
async def test_text_that_only_the_standard_library_parses_is_read_back(
    tmp_path: Path, first: str
) -> None:
    """Half a surrogate pair, and numbers that are none."""
    odd = Step(b'{"text":"\\ud83d","worth":NaN}', b"null", None, True, b'{"far":[1e999,-Infinity]}')
    async with await RolloutWriter.open(tmp_path) as writer:
        await writer.put_step("a", 0, odd)
        await writer.finish(episode("a", final_observation_json=b'"\\ud83d"'))
    found = open_rollouts(tmp_path).episode("a")
    [row] = found.steps()
    getattr(row, first)
    assert row.observation["text"] == "\ud83d"
    assert math.isnan(row.observation["worth"])
    assert (row.info, row.action) == ({"far": [math.inf, -math.inf]}, None)
    assert found.final_observation == "\ud83d"


async def test_rollouts_can_be_pickled_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's workers get the folder, an episode, or a step, and may run elsewhere."""
    await write(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    rollouts = open_rollouts("out")
    monkeypatch.chdir("/")
    there = pickle.loads(pickle.dumps(rollouts))
    assert seen(there) == ABC
    [again, *_] = pickle.loads(pickle.dumps(there.episode("b"))).steps()
    for copied in (again, pickle.loads(pickle.dumps(again))):
        assert (copied.info, copied.arrays["experts"].numpy()[0, 0, 0]) == ({"note": "b"}, 10)


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """The file of an episode, which is to be damaged."""
    await written(tmp_path, "a", text="x" * CHUNK_BYTES)
    return tmp_path / "episodes" / "a.jsonl"


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 300), Path.unlink])
async def test_a_file_that_was_cut_or_removed_is_named(
    tmp_path: Path, path: Path, damage: Callable[[Path], object]
) -> None:
    rollouts = open_rollouts(tmp_path)
    early = rollouts.episode("a")
    damage(path)
    told = r"a\.jsonl" if path.exists() else r"a\.jsonl is missing"
    again = open_rollouts(tmp_path) if path.exists() else rollouts
    for read in (lambda: list(early.steps()), rollouts.verify, again.verify):
        with pytest.raises(OutputDamaged, match=told):
            read()


async def test_a_file_with_other_bytes_is_damaged(tmp_path: Path, path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"xxx', b"\xff\xffxx"))
    with pytest.raises(OutputDamaged, match="a row is not JSON"):
        seen(open_rollouts(tmp_path))
    with pytest.raises(OutputDamaged, match="has changed since it was written"):
        open_rollouts(tmp_path).verify()


@pytest.mark.parametrize(
    "changed", [(b'"reward":1.0', b'"reward":9.0'), (b'"seed":7', b'"seed":8')]
)
async def test_a_changed_value_is_found_by_the_checksum(
    tmp_path: Path, path: Path, changed: tuple[bytes, bytes]
) -> None:
    path.write_bytes(path.read_bytes().replace(*changed))
    with pytest.raises(OutputDamaged, match="a has another checksum"):
        open_rollouts(tmp_path).verify()
