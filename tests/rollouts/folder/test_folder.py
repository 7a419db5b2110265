# SPDX-License-Identifier: Apache-2.0
"""A folder of rollouts: an episode is there as a whole and once, or not at all.

What `rollouts/folder/__init__.py` says of failures, line for line.
"""

import asyncio
import errno
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.errors import EpisodeRefused, OutputBusy, OutputFull
from openenvd.rollouts.folder import packs
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.readers import UNFINISHED, episodes_in, open_rollouts
from openenvd.rollouts.folder.rows import Verdict
from openenvd.rollouts.folder.writer import CHUNK_BYTES, RolloutWriter

from ..made import episode, finish, image, names, put_steps, rows, step, written

LARGE = "x" * CHUNK_BYTES
CRASHES = 90


def ids(folder: Path) -> list[str]:
    return open_rollouts(folder).episode_ids()


async def test_episodes_that_run_at_once_are_apart_and_in_the_order_of_their_ids(
    tmp_path: Path,
) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        for number in range(3):
            for name in "abc":
                await writer.put_step(name, number, step(number, name))
        for name in "cab":
            await writer.finish(episode(name))
    for found in open_rollouts(tmp_path):
        assert [s.observation["text"] for s in found.steps()] == [found.id] * 3
        assert [s.observation["number"] for s in found.steps()] == [0, 1, 2]
    assert ids(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["small", LARGE])
async def test_an_unfinished_episode_leaves_nothing(tmp_path: Path, text: str) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await put_steps(writer, "a", text=text)
    assert (ids(tmp_path), names(tmp_path), (tmp_path / UNFINISHED).exists()) == ([], [], False)


@pytest.mark.parametrize("text", ["first", LARGE])
async def test_a_discarded_attempt_is_forgotten_and_the_next_begins_anew(
    tmp_path: Path, text: str
) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await put_steps(writer, "a", text=text)
        await writer.discard("a")
        await finish(writer, "a", steps=1, text="second")
    [found] = open_rollouts(tmp_path)
    assert [s.observation["text"] for s in found.steps()] == ["second"]


async def test_a_missing_step_refuses_the_episode_and_its_group_and_forgets_them(
    tmp_path: Path,
) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await put_steps(writer, "a")
        await writer.put_step("b", 1, step())
        with pytest.raises(EpisodeRefused, match="b is not whole: step 1 came after 0 steps"):
            await writer.finish_together([(episode("a"), Verdict()), (episode("b"), Verdict())])
        await finish(writer, "b")
    assert ids(tmp_path) == ["b"]


async def test_an_episode_is_finished_once(tmp_path: Path) -> None:
    for _ in range(2):
        async with await RolloutWriter.open(tmp_path) as writer:
            if "a" not in writer.finished_episode_ids():
                await finish(writer, "a")
            with pytest.raises(EpisodeRefused, match="finished before"):
                await finish(writer, "a")
    assert ids(tmp_path) == ["a"]


async def test_a_filtered_episode_is_finished_but_has_no_steps(tmp_path: Path) -> None:
    """So that it is not run again."""
    async with await RolloutWriter.open(tmp_path) as writer:
        await put_steps(writer, "a", text=LARGE)
        await writer.finish_together([(episode("a"), Verdict(filtered="reward"))])
    [found] = open_rollouts(tmp_path)
    assert (found.row["filtered"], found.row["steps"], list(found.steps())) == ("reward", 0, [])
    assert found.final_observation is None
    async with await RolloutWriter.open(tmp_path) as writer:
        assert writer.finished_episode_ids() == {"a"}


async def test_texts_with_line_breaks_stay_one_row(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        pretty = type(step())(b'{\n "text":\r\n "x"}', b"[1,\n2]", 0.0, True)
        await writer.put_step("a", 0, pretty)
        await writer.finish(
            episode("a", final_observation_json=b'{\n"whole": 18446744073709551617}')
        )
    [found] = open_rollouts(tmp_path)
    [row] = found.steps()
    assert (row.observation, row.action) == ({"text": "x"}, [1, 2])
    assert found.final_observation == {"whole": 2**64 + 1}  # and not the nearest float


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "..", ".hidden", "ü %2F", "group-1"])
async def test_an_id_may_be_any_text(tmp_path: Path, name: str) -> None:
    async with await RolloutWriter.open(tmp_path / "out") as writer:
        await finish(writer, name, text=LARGE)
        await finish(writer, f"{name} small")
        both = [f"{name}1", f"{name}2"]
        for member in both:
            await put_steps(writer, member, text=LARGE)
        await writer.finish_together([(episode(member), Verdict()) for member in both])
    assert sorted(ids(tmp_path / "out")) == sorted([name, f"{name} small", *both])
    assert os.listdir(tmp_path) == ["out"]
    assert {row["episode_id"] for row in rows(tmp_path / "out")} == set(ids(tmp_path / "out"))


async def test_an_id_that_no_file_name_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EpisodeRefused, match="is too long"):
        await written(tmp_path, "x" * 300)


async def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path):
        with pytest.raises(OutputBusy):
            await RolloutWriter.open(tmp_path)
    await (await RolloutWriter.open(tmp_path)).close()


async def test_many_small_files_are_packed_when_a_rollout_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of earlier rollouts into the folder, and those of groups."""
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 9)
    for part in range(3):
        async with await RolloutWriter.open(tmp_path) as writer:
            await finish(writer, f"small{part}")
            members = [f"{part}-0", f"{part}-1"]
            for name in members:
                await put_steps(writer, name, steps=1, text=LARGE)
            await writer.finish_together([(episode(name), Verdict()) for name in members])
    assert names(tmp_path) == ["packs/00003.jsonl"]
    assert os.listdir(tmp_path / "episodes") == []
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert len(rollouts) == len(rows(tmp_path)) == 9
    assert all(len(list(found.steps())) == found.row["steps"] for found in rollouts)


async def test_a_rollout_that_goes_on_for_long_packs_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MAX_FILES", 4)
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 4)
    writer = await RolloutWriter.open(tmp_path)
    for number in range(5):
        await finish(writer, str(number), steps=1, text=LARGE)
    async with asyncio.timeout(30):
        while not list((tmp_path / "packs").glob("*.jsonl")):
            await asyncio.sleep(0.01)
    await writer.close()
    assert ids(tmp_path) == [str(number) for number in range(5)]


async def test_packs_end_at_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 2)
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * CHUNK_BYTES)
    await written(tmp_path, *"012345", steps=1, text=LARGE)
    assert len(names(tmp_path)) == 3
    open_rollouts(tmp_path).verify()


# After a crash. The child is killed at the moment that is looked at; nothing of it can tidy up.


def crash(
    folder: Path, write: Callable[[RolloutWriter], Awaitable[None]], disk: Disk | None = None
) -> None:
    """What a process that is killed in the end leaves of its writing."""

    async def run() -> None:
        await write(await RolloutWriter.open(folder, disk=disk))

    child = os.fork()
    if child == 0:
        try:
            asyncio.set_event_loop(None)
            asyncio.new_event_loop().run_until_complete(run())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


class DiesAt(Disk):
    """Kills the process before the so-manieth thing it does."""

    def __init__(self, countdown: int) -> None:
        self._countdown = countdown

    def _tick(self) -> None:
        self._countdown -= 1
        if self._countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        self._tick()
        half = len(chunks[0]) // 2
        super().write(descriptor, [bytes(chunks[0])[:half]])
        self._tick()  # torn
        super().write(descriptor, [bytes(chunks[0])[half:], *chunks[1:]])

    def sync(self, path: Path, *, drop_cached: bool = False) -> None:
        self._tick()
        super().sync(path, drop_cached=drop_cached)

    def rename(self, source: Path, target: Path) -> None:
        self._tick()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._tick()
        super().remove(path)


SINGLE = {"a": "s", "b": LARGE, "c": "s", "d": LARGE, "e": "s"}
GROUPS = {"f": ("s", "s"), "g": ("s", LARGE), "h": (LARGE, LARGE)}
ALL = [*SINGLE, *(f"{name}{number}" for name in GROUPS for number in range(2))]


async def some_of_everything(writer: RolloutWriter) -> None:
    """Small and large ones, groups of both, each of them by itself; and they are packed."""
    there = writer.finished_episode_ids()
    for name, text in SINGLE.items():
        if name not in there:
            await writer.put_step(name, 0, step(0, text, {"image": image(ord(name))}))
            await writer.finish(episode(name))
            await writer._commit_all()
    for name, texts in GROUPS.items():
        members = [f"{name}{number}" for number in range(2)]
        if there.isdisjoint(members):
            for member, text in zip(members, texts, strict=True):
                await writer.put_step(member, 0, step(0, text))
            await writer.finish_together([(episode(one), Verdict(0.5)) for one in members])
            await writer._commit_all()
    await writer.close()


def whole_groups(there: Sequence[str]) -> bool:
    return all((f"{name}0" in there) == (f"{name}1" in there) for name in GROUPS)


@pytest.fixture(autouse=True)
def commits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each episode is committed by itself where a test asks for it."""
    monkeypatch.setattr("openenvd.rollouts.folder.writer.COMMIT_SECONDS", 0.0)


@pytest.mark.parametrize("at", range(0, CRASHES, 2))
async def test_a_crash_at_any_point_leaves_each_episode_once_or_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """And a second crash while the first is mended. A pattern finds none twice, before or after."""
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 2)
    for countdown in (at, at // 3):
        crash(tmp_path, some_of_everything, DiesAt(countdown))
        if not (tmp_path / "episodes").exists():
            continue
        there = ids(tmp_path)
        open_rollouts(tmp_path).verify()
        assert whole_groups(there)
        found = Counter(row["episode_id"] for row in rows(tmp_path))
        assert set(found.values()) <= {1}
        assert found.keys() <= set(there)
    writer = await RolloutWriter.open(tmp_path)
    if (tmp_path / "episodes").exists():
        assert writer.finished_episode_ids() == set(ids(tmp_path))
    await some_of_everything(writer)
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert sorted(rollouts.episode_ids()) == ALL
    assert Counter(row["episode_id"] for row in rows(tmp_path)) == Counter(ALL)
    assert Counter(row["episode_id"] for row in rows(tmp_path, "step")) == Counter(ALL)
    for name in SINGLE:
        [row] = rollouts.episode(name).steps()
        assert bytes(row.arrays["image"].data) == bytes([ord(name)]) * 100


def test_the_crashes_reach_beyond_the_packing(tmp_path: Path) -> None:
    """Else the range of the test above would have to grow."""

    class Counting(DiesAt):
        def _tick(self) -> None:
            super()._tick()
            (tmp_path / "ticks").write_text(str(10**6 - self._countdown))

    crash(tmp_path / "out", some_of_everything, Counting(10**6))
    assert int((tmp_path / "ticks").read_text()) <= CRASHES


async def test_episodes_exist_soon_after_they_are_finished(tmp_path: Path) -> None:
    async def write(writer: RolloutWriter) -> None:
        await finish(writer, "a")
        await finish(writer, "large", text=LARGE)
        await writer._commit_all()
        await finish(writer, "b")
        await put_steps(writer, "c", text=LARGE)

    crash(tmp_path, write)
    kept = set(ids(tmp_path))
    assert {"a", "large"} <= kept <= {"a", "large", "b"}  # "b": where the crash came late
    async with await RolloutWriter.open(tmp_path) as writer:
        assert writer.finished_episode_ids() == kept


async def test_a_full_disk_while_a_pack_takes_its_place_leaves_each_episode_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 3)

    class FullOnce(Disk):
        is_full = True

        def sync(self, path: Path, *, drop_cached: bool = False) -> None:
            super().sync(path, drop_cached=drop_cached)
            if self.is_full and list(path.glob("*.packing")):
                self.is_full = False
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

    writer = await RolloutWriter.open(tmp_path, disk=FullOnce())
    for name in "abc":
        await finish(writer, name, steps=1, text=LARGE)
    with pytest.raises(OutputFull):
        await writer.close()
    assert list((tmp_path / "packs").glob("*.packing"))
    async with await RolloutWriter.open(tmp_path) as writer:
        assert writer.finished_episode_ids() == set("abc")
    assert names(tmp_path) == ["packs/00000.jsonl"]
    open_rollouts(tmp_path).verify()


async def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    foreign = [".nfs000000000001", "packs/.nfs000000000001", "packs/backup.jsonl", "notes.jsonl"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    for name in "ab":
        await written(tmp_path, name)
    assert ids(tmp_path) == ["a", "b"]
    assert {(tmp_path / name).read_text() for name in foreign} == {"mine"}


async def test_listing_beside_a_packing_writer_misses_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 2)
    monkeypatch.setattr(packs, "PACK_BYTES", CHUNK_BYTES)
    async with await RolloutWriter.open(tmp_path) as writer:
        for number in range(40):
            await finish(writer, str(number), steps=1, text=LARGE)
        await writer._commit_all()
        assert len(episodes_in(tmp_path)) == 40
        closing = asyncio.create_task(writer.close())
        looks = 0
        while not closing.done():
            found = await asyncio.to_thread(open_rollouts, tmp_path)
            assert len(found) == 40
            looks += 1
        await closing
    assert looks
    assert len(names(tmp_path)) == 40
