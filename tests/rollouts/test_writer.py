# SPDX-License-Identifier: Apache-2.0
"""The writer's thread: bounded, in order, and honest when the disk fails."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike, Step
from openenvd.rollouts.errors import (
    EpisodeRefused,
    OutputBusy,
    OutputError,
    OutputFull,
    RolloutError,
    WriterClosed,
)
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.layout import FORMATS
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.spool import LIKELY_BYTES
from openenvd.rollouts.folder.writer import FIRST_BYTES, RolloutWriter

from .made import episode, step

KB = 1024


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [one.name for one in threading.enumerate() if one.name.startswith("rollout-")]


async def run_episode(writer: RolloutWriter, name: str, steps: int = 3, text: str = "x") -> None:
    for number in range(steps):
        room = await writer.reserve(len(text) + KB)
        await writer.put_step(name, number, step(number, text), room)
    await writer.finish(episode(name))


async def test_episodes_at_once_are_all_written(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path, buffer_bytes=64 * KB) as writer:
        await asyncio.gather(*(run_episode(writer, str(n), 5, "x" * KB) for n in range(50)))
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert (len(rollouts), rollouts.steps) == (50, 250)
    assert writer.budget.used_bytes == 0
    assert writer.budget.peak_bytes <= writer.budget.limit_bytes


async def test_a_folder_may_be_a_text(tmp_path: Path) -> None:
    async with await RolloutWriter.open(str(tmp_path / "out")) as writer:
        await run_episode(writer, "one")
    assert len(open_rollouts(str(tmp_path / "out"))) == 1


class Gate(Disk):
    """A disk that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        assert self.opened.wait(30)
        super().write(descriptor, chunks)


async def test_collecting_waits_for_a_disk_that_stands_still_and_loses_nothing(
    tmp_path: Path,
) -> None:
    disk = Gate()
    async with await RolloutWriter.open(tmp_path, buffer_bytes=2048 * KB, disk=disk) as writer:
        disk.opened.clear()
        running = [asyncio.create_task(run_episode(writer, str(n), 4, "x" * 300 * KB))
                   for n in range(8)]  # fmt: skip
        while writer.budget.waiting < 2:
            await asyncio.sleep(0)
        assert writer.budget.used_bytes <= writer.budget.limit_bytes
        disk.opened.set()
        await asyncio.gather(*running)
    assert len(open_rollouts(tmp_path)) == 8


async def test_the_budget_grows_when_the_writer_was_idle_while_steps_waited(
    tmp_path: Path,
) -> None:
    """With more room, more would have been collected while the disk stood still."""
    disk, filled = Gate(), []
    async with await RolloutWriter.open(
        tmp_path, buffer_bytes=8192 * KB, disk=disk, first_bytes=700 * KB
    ) as writer:
        for stall in range(20):  # the second time, but for a thread that is slow to look
            disk.opened.clear()
            running = [asyncio.create_task(run_episode(writer, f"{stall}-{n}", 4, "x" * 300 * KB))
                       for n in range(8)]  # fmt: skip
            while writer.budget.waiting < 2:
                await asyncio.sleep(0)
            filled.append(writer.budget.used_bytes)
            disk.opened.set()
            await asyncio.gather(*running)
            if filled[-1] > 700 * KB:
                break
    assert filled[0] <= 700 * KB < filled[-1]


async def test_room_can_be_reserved_ahead(tmp_path: Path) -> None:
    """All that is configured, though nothing is written yet that would give any back."""
    async with await RolloutWriter.open(tmp_path, buffer_bytes=FIRST_BYTES * 4) as writer:
        rooms = [await writer.reserve(1 << 20) for _ in range(writer.budget.limit_bytes >> 20)]
        assert writer.budget.used_bytes > FIRST_BYTES
        for room in rooms:
            room.release()


async def test_several_writers_share_a_disk(tmp_path: Path) -> None:
    disk, text = Disk(), LIKELY_BYTES * "x"

    async def write(name: str) -> None:
        async with await RolloutWriter.open(tmp_path / name, disk=disk) as writer:
            episodes = (run_episode(writer, f"{name}{n}", 9, name + text) for n in range(4))
            await asyncio.gather(*episodes)

    await asyncio.gather(*map(write, "abc"))
    for name in "abc":
        rollouts = open_rollouts(tmp_path / name)
        rollouts.verify()
        assert {s.observation["text"] for e in rollouts for s in e.steps()} == {name + text}


async def test_whole_episodes_can_be_put(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await writer.put(episode("a", steps=4))
    [found] = open_rollouts(tmp_path)
    assert len(list(found.steps())) == 4


async def test_finished_ids_of_earlier_runs_are_known(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        await run_episode(writer, "a")
    async with await RolloutWriter.open(tmp_path) as writer:
        assert writer.finished_episode_ids() == {"a"}


async def test_a_refused_episode_does_not_stop_the_writer(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        room = await writer.reserve(1)
        await writer.put_step("a", 5, step(), room)
        with pytest.raises(EpisodeRefused):
            await writer.finish(episode("a"))
        await run_episode(writer, "b")
    assert open_rollouts(tmp_path).episode_ids() == ["b"]


async def test_discarded_attempts_give_their_room_back(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        room = await writer.reserve(1)
        await writer.put_step("a", 0, step(), room)
        await writer.discard("a")
    assert (writer.budget.used_bytes, len(open_rollouts(tmp_path))) == (0, 0)


async def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    writer = await RolloutWriter.open(tmp_path)
    room = await writer.reserve(1)
    await writer.close()
    await writer.close()
    with pytest.raises(WriterClosed):
        await writer.put_step("a", 0, step(), room)
    with pytest.raises(WriterClosed):
        await writer.put(episode("a"))
    assert writer.budget.used_bytes == 0


async def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path):
        with pytest.raises(OutputBusy):
            await RolloutWriter.open(tmp_path)


async def test_finished_episodes_become_durable_without_closing(tmp_path: Path) -> None:
    """A second later, at the latest: here the thread is asked for another thing meanwhile."""
    writer = await RolloutWriter.open(tmp_path)
    await run_episode(writer, "a")
    manifest = tmp_path / "manifest.jsonl"
    async with asyncio.timeout(30):
        while b'"episode_ids":["a"]' not in manifest.read_bytes():
            await asyncio.sleep(0.01)
    await writer.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one, of sixteen megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("size", [20 * KB, 700 * KB, 1700 * KB])
async def test_a_full_disk_fails_all_calls_and_keeps_finished_episodes(
    small_disk: Path, size: int
) -> None:
    folder = small_disk / "out"
    finished: list[str] = []

    async def run(name: str) -> None:
        await run_episode(writer, name, 3, "x" * size)
        finished.append(name)

    writer = await RolloutWriter.open(folder, buffer_bytes=1024 * KB)
    tasks = [asyncio.create_task(run(f"{n:04}")) for n in range(300)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(o) for o in outcomes if o is not None} == {OutputFull}
    for late in (run_episode(writer, "late"), writer.close(), writer.close()):
        with pytest.raises(OutputFull):
            await late
    assert writer.budget.used_bytes == 0
    with Output(folder) as again:
        assert again.finished_episode_ids == set(finished)
    open_rollouts(folder).verify()


class Broken(Disk):
    """Fails in a way that nobody thought of."""

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        if any(len(chunk) > 100 * KB for chunk in chunks):
            raise ZeroDivisionError
        super().write(descriptor, chunks)


async def test_an_unexpected_exception_ends_the_writer_with_a_rollout_error(tmp_path: Path) -> None:
    writer = await RolloutWriter.open(tmp_path, disk=Broken())
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        await run_episode(writer, "a", text="x" * 300 * KB)
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        await writer.close()


async def test_cancelling_one_call_leaves_the_others_alone(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        task = asyncio.create_task(run_episode(writer, "a"))
        await asyncio.sleep(0)
        task.cancel()
        await run_episode(writer, "b")
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "b" in open_rollouts(tmp_path).episode_ids()


@pytest.mark.parametrize("form", FORMATS)
async def test_unusual_json_texts_are_kept(tmp_path: Path, form: str) -> None:
    odd = Step(b'{"half":"\\ud800"}', b"null", None, True)
    async with await RolloutWriter.open(tmp_path, form=form) as writer:
        room = await writer.reserve(1)
        await writer.put_step("a", 0, odd, room)
        await writer.finish(episode("a"))
    [found] = open_rollouts(tmp_path)
    [row] = found.steps()
    assert row.observation == {"half": "\ud800"}


def test_every_error_has_a_hint() -> None:
    assert all(cls("x").hint for cls in OutputError.__subclasses__())
