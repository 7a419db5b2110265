# SPDX-License-Identifier: Apache-2.0
"""The writer: bounded, never on the event loop, and honest when the disk fails."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.errors import OutputError, OutputFull, RolloutError, WriterClosed
from openenvd.rollouts.folder import writer as writer_module
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.readers import UNFINISHED, open_rollouts
from openenvd.rollouts.folder.writer import CHUNK_BYTES, HELD_SHARE, RolloutWriter

from ...disks import mounted
from ..made import episode, finish, names, step

KB = 1024


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [one.name for one in threading.enumerate() if one.name.startswith("rollout-")]


async def test_episodes_at_once_are_all_written(tmp_path: Path) -> None:
    """Step by step, or each as a whole."""
    async with await RolloutWriter.open(str(tmp_path), buffer_bytes=64 * KB) as writer:
        await asyncio.gather(*(finish(writer, str(n), 5, "x" * KB) for n in range(50)))
        await writer.put(episode("whole", steps=4))
    rollouts = open_rollouts(str(tmp_path))
    rollouts.verify()
    assert sum(len(list(found.steps())) for found in rollouts) == 254
    assert (len(rollouts), writer._held_bytes) == (51, 0)


class Gate(Disk):
    """A disk that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        assert self.opened.wait(30)
        super().write(descriptor, chunks)


async def test_what_ends_during_a_commit_shares_a_file_with_what_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load there is a file for each half second, not one for each moment of the disk's."""
    monkeypatch.setattr(writer_module, "COMMIT_SECONDS", 3600.0)
    monkeypatch.setattr(writer_module, "MAX_ENDED", 1)
    disk = Gate()
    async with await RolloutWriter.open(tmp_path, disk=disk) as writer:
        await finish(writer, "a")
        committing = asyncio.create_task(finish(writer, "b"))  # one too many: it waits
        while writer._ended:
            await asyncio.sleep(0)
        await finish(writer, "c")
        disk.opened.set()
        await committing
        await finish(writer, "d")
    assert names(tmp_path) == ["packs/00000.jsonl", "packs/00001.jsonl"]


@pytest.mark.parametrize("size", [KB, 300 * KB])
async def test_collecting_waits_for_a_disk_that_stands_still_and_loses_nothing(
    tmp_path: Path, size: int
) -> None:
    """Each episode has a step too many in memory at most; and the event loop goes on."""
    disk, taken = Gate(), 0
    most = 256 * KB // HELD_SHARE
    async with await RolloutWriter.open(tmp_path, buffer_bytes=256 * KB, disk=disk) as writer:

        async def run(name: str) -> None:
            nonlocal taken
            for number in range(20):
                await writer.put_step(name, number, step(number, "x" * size))
                taken += 1
            await writer.finish(episode(name))

        running = [asyncio.create_task(run(str(n))) for n in range(8)]
        await asyncio.sleep(0.2)
        assert writer._held_bytes <= most + 8 * (size + KB)
        assert taken * size <= most
        disk.opened.set()
        await asyncio.gather(*running)
    assert (len(open_rollouts(tmp_path)), taken) == (8, 160)


async def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    writer = await RolloutWriter.open(tmp_path)
    await writer.close()
    await writer.close()
    with pytest.raises(WriterClosed):
        await writer.put_step("a", 0, step())
    with pytest.raises(WriterClosed):
        await writer.put(episode("a"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=16m") as folder:
        yield folder


@pytest.mark.parametrize("size", [20 * KB, 700 * KB, 1700 * KB])
async def test_a_full_disk_fails_all_calls_and_keeps_what_exists(
    small_disk: Path, size: int
) -> None:
    folder = small_disk / "out"
    writer = await RolloutWriter.open(folder, buffer_bytes=1024 * KB)
    await finish(writer, "first", 3, "x" * size)
    await writer._commit_all()
    tasks = [finish(writer, f"{n:04}", 3, "x" * size) for n in range(300)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(o) for o in outcomes if o is not None} == {OutputFull}
    for late in (finish(writer, "late"), writer.close(), writer.close()):
        with pytest.raises(OutputFull, match="no space left") as told:
            await late
    assert "finished episodes are kept" in str(told.value.hint)
    open_rollouts(folder).verify()
    async with await RolloutWriter.open(folder) as again:
        there = again.finished_episode_ids()
        assert "first" in there
        await finish(again, "late")  # there is room again
    assert set(open_rollouts(folder).episode_ids()) == {*there, "late"}


class NoRoomForPacks(Disk):
    """Is full when files are packed."""

    def append(self, path: Path, chunks: Sequence[BytesLike], *, write_back: bool = False) -> None:
        super().append(path, chunks, write_back=write_back)
        if any(b'"index":' in bytes(chunk[:10]) for chunk in chunks):
            raise OSError(28, "No space left on device")


async def test_small_files_stay_as_they_are_where_a_pack_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openenvd.rollouts.folder.writer.MIN_PACKED", 2)
    async with await RolloutWriter.open(tmp_path, disk=NoRoomForPacks()) as writer:
        for name in "abc":
            await finish(writer, name, steps=1, text="x" * CHUNK_BYTES)
    assert names(tmp_path) == [f"episodes/{name}.jsonl" for name in "abc"]
    assert "stay in files of their own" in caplog.text
    assert not (tmp_path / UNFINISHED).exists()


class Broken(Disk):
    """Fails in a way that nobody thought of."""

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        raise ZeroDivisionError


async def test_an_unexpected_exception_ends_the_writer_with_a_rollout_error(tmp_path: Path) -> None:
    writer = await RolloutWriter.open(tmp_path, disk=Broken())
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        await finish(writer, "a", text="x" * 300 * KB)
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        await writer.close()


async def test_cancelling_one_call_leaves_the_others_alone(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path) as writer:
        task = asyncio.create_task(finish(writer, "a", text="x" * CHUNK_BYTES))
        await asyncio.sleep(0)
        task.cancel()
        await finish(writer, "b")
        with pytest.raises(asyncio.CancelledError):
            await task
    assert open_rollouts(tmp_path).episode_ids() == ["b"]


def test_every_error_has_a_hint() -> None:
    assert all(cls("x").hint for cls in OutputError.__subclasses__())
