# SPDX-License-Identifier: Apache-2.0
"""Files that others cut, change or remove are named and set aside, and their episodes played again.

The product of what is done, when it is done, and to what.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.folder.damage import KNOWN_FILES
from openenvd.rollouts.folder.readers import EPISODES, PACKS, UNFINISHED, open_rollouts
from openenvd.rollouts.folder.rows import EpisodeFile, Verdict
from openenvd.rollouts.folder.writer import CHUNK_BYTES, Output, RolloutWriter
from openenvd.rollouts.run import RECORD, Report

from ..conftest import Serve, address_of
from ..made import episode, finish, put_steps, rows
from ..test_run import order_of, run

LARGE = "x" * CHUNK_BYTES
SMALL = ("000000", "000001", "000002")  # of one pack
ALL = [*SMALL, "000003"]
EPISODE, PACK = "episodes/000003.jsonl", "packs/00000.jsonl"


@pytest.fixture(autouse=True)
def commits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenvd.rollouts.folder.writer.COMMIT_SECONDS", 0.0)


async def filled(folder: Path) -> RolloutWriter:
    writer = await RolloutWriter.open(folder)
    await writer.finish_together([(episode(name), Verdict()) for name in SMALL])
    await writer._commit_all()
    await finish(writer, "000003", text=LARGE)
    await writer._commit_all()
    return writer


def cut(path: Path, end: int) -> None:
    os.truncate(path, end)


def change(path: Path, at: int) -> None:
    """As a text editor and a failing disk do: the size stays."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def spoil(path: Path, what: str, how: str) -> set[str]:
    """Damages a file; returns the episodes that are lost by it."""
    content = path.read_bytes()
    index_at = content.find(b',"index":')
    middle = content.find(b'"episode_id":"000001"')
    if what == "index":
        if how == "removed":
            path.write_bytes(content[:index_at] + b"}}\n")
        elif how == "cut":
            cut(path, len(content) - 4)
        else:
            change(path, content.find(b"0", index_at + len(b',"index":[["000000"')))
        return set()
    if how == "removed":
        path.unlink()
    elif how == "cut":
        cut(path, middle if what == "pack" else len(content) // 2)
    else:
        change(path, middle - 3 if what == "pack" else len(content) // 2)
    if what == "pack":
        return {"cut": {"000001", "000002"}, "changed": {"000001"}}.get(how, set(SMALL))
    return {"000003"}


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("path", [EPISODE, PACK])
async def test_what_is_no_file_is_set_aside_unread(
    tmp_path: Path, path: str, make: Callable[[Path], object]
) -> None:
    await (await filled(tmp_path)).close()
    (tmp_path / path).unlink()
    make(tmp_path / path)
    writer = await RolloutWriter.open(tmp_path)
    _, [words] = await writer.check()
    await writer.close()
    assert words.startswith(f"{path} was cut or changed; it is damaged/")


@pytest.mark.parametrize("how", ["cut", "removed", "changed"])
@pytest.mark.parametrize("when", ["while it runs", "before it continues"])
@pytest.mark.parametrize(
    ("what", "path"), [("episode file", EPISODE), ("pack", PACK), ("index", PACK)]
)
async def test_a_damaged_file_is_named_set_aside_and_its_episodes_are_played_again(
    tmp_path: Path, how: str, when: str, what: str, path: str
) -> None:
    writer = await filled(tmp_path)
    if when == "before it continues":
        await writer.close()
    expected = spoil(tmp_path / path, what, how)
    if when == "before it continues":
        writer = await RolloutWriter.open(tmp_path)
        lost, words = await writer.check()
        assert set(ALL) - writer.finished_episode_ids() == expected
    else:
        lost, words = await writer.check()
        assert lost == expected
    is_there = (tmp_path / path).exists()
    if how == "removed" and what != "index":
        assert words == [f"{path} was removed"]
    else:
        [told_of_it] = words
        assert told_of_it.startswith(f"{path} was cut or changed; it is damaged/")
        assert (tmp_path / told_of_it.rpartition("it is ")[2].removesuffix(" now")).is_file()
        assert not is_there
    for name in expected:
        await finish(writer, name, text="again")
    assert await writer.check() == (frozenset(), [])
    await writer.close()
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert rollouts.episode_ids() == ALL
    assert Counter(row["episode_id"] for row in rows(tmp_path)) == Counter(ALL)


@pytest.mark.parametrize("how", ["cut", "removed", "changed"])
async def test_an_episode_whose_file_is_damaged_while_it_is_written_is_played_again(
    tmp_path: Path, how: str
) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await put_steps(writer, "000003", text=LARGE)
        [path] = (tmp_path / UNFINISHED).iterdir()
        spoil(path, "episode file", how)
        await writer.put_step("000003", 3, episode("", steps=1).steps[0])
        await writer.finish(episode("000003"))
        lost, [told] = await writer.check()
        assert lost == {"000003"}
        assert told.startswith("episodes/000003.jsonl was cut or changed; it is damaged/")
        await finish(writer, "000003")
    open_rollouts(tmp_path).verify()


@pytest.mark.parametrize("name", [EPISODES, PACKS, UNFINISHED])
async def test_a_folder_that_is_removed_while_it_is_written_is_made_again(
    serve: Serve, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = order_of(address_of(serve()), tmp_path, "late", episodes=100)
    commit, removed = Output.commit, list[Path]()

    def commit_and_remove(output: Output, ended: Sequence[Sequence[EpisodeFile]]) -> None:
        commit(output, ended)
        if not removed:
            shutil.rmtree(path := config.folder / name)
            (config.folder / RECORD).unlink()
            removed.append(path)
            (tmp_path / "done").touch()  # only now the last episode may end

    monkeypatch.setattr(Output, "commit", commit_and_remove)
    result = await run(config, tmp_path)
    assert removed
    assert f"{RECORD} was removed, and is there again" in result["damaged"]
    assert (f"{PACK} was removed" in result["damaged"]) == (name == PACKS)
    assert (result["there"], result["done"], result["mean_reward"]) == (100, 100, 15.0)
    open_rollouts(config.folder).verify()


async def test_files_that_went_into_a_pack_before_a_crash_are_not_called_removed(
    tmp_path: Path,
) -> None:
    await (await filled(tmp_path)).close()
    known = (tmp_path / KNOWN_FILES).read_bytes()
    before = known.replace(PACK.encode(), b"packs/00009.jsonl")
    (tmp_path / KNOWN_FILES).write_bytes(before + b'["cut')
    writer = await RolloutWriter.open(tmp_path)
    assert await writer.check() == (frozenset(), [])
    await writer.close()
    assert (tmp_path / KNOWN_FILES).read_bytes() == known


async def test_a_file_that_is_touched_and_not_changed_is_kept(tmp_path: Path) -> None:
    writer = await filled(tmp_path)
    for path in (EPISODE, PACK):
        os.utime(tmp_path / path, (1, 1))
    assert await writer.check() == (frozenset(), [])
    await writer.close()


@pytest.mark.parametrize("text", ["small", LARGE])
async def test_the_whole_group_of_a_damaged_episode_is_played_again(
    tmp_path: Path, text: str
) -> None:
    writer = await RolloutWriter.open(tmp_path, group=2)
    for pair in (SMALL[:2], ("000002", "000003")):
        for name in pair:
            await put_steps(writer, name, text=text)
        await writer.finish_together([(episode(name), Verdict()) for name in pair])
    await writer._commit_all()
    [path] = [path for path in tmp_path.glob("**/*.jsonl") if b'"000001"' in path.read_bytes()]
    change(path, path.read_bytes().find(b'"episode_id":"000001"') - 3)
    lost, words = await writer.check()
    assert lost == {"000000", "000001"}
    assert words
    await writer.close()
    assert open_rollouts(tmp_path).episode_ids() == ["000002", "000003"]
    open_rollouts(tmp_path).verify()


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"seed": 1}', None])
async def test_a_damaged_record_is_set_aside(
    serve: Serve, tmp_path: Path, kept: str | None
) -> None:
    config = order_of(address_of(serve()), tmp_path, episodes=2)
    await run(config, tmp_path)
    record = config.folder / RECORD
    if kept is None:
        record.unlink()
        record.mkdir()
    else:
        record.write_text(kept)
    result = await run(config, tmp_path)
    assert (result["earlier"], len(result["damaged"])) == (2, 1)
    assert "rollout.json was cut or changed" in result["damaged"][0]
    assert (await run(config, tmp_path))["damaged"] == []


async def test_a_rollout_plays_again_what_is_damaged_while_it_runs(
    serve: Serve, tmp_path: Path
) -> None:
    config = order_of(address_of(serve()), tmp_path, "late", episodes=200)
    spoiled: list[Path] = []

    def tell(report: Report) -> None:
        path = config.folder / PACK
        if not spoiled and path.exists():
            path.unlink()
            spoiled.append(path)
            (tmp_path / "done").touch()

    result = await run(config, tmp_path, tell=tell)
    assert spoiled
    assert result["damaged"] == [f"{PACK} was removed"]
    assert (result["there"], result["wanted"]) == (200, 200)
    assert (result["done"], result["mean_reward"]) == (200, 15.0)
    found = Counter(row["episode_id"] for row in rows(config.folder))
    assert found == Counter(f"{number:06d}" for number in range(200))
