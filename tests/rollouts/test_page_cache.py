# SPDX-License-Identifier: Apache-2.0
"""Large files are dropped from the page cache, as far as the kernel has written them back."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.rows import StepRow
from openenvd.rollouts.folder.spool import LIKELY_BYTES, OWN_PART_BYTES

from .made import finish

BLOCK = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None, use_errno=True)


class PromptDisk(Disk):
    """Writes back each append before the next: when the kernel does so by itself is not known."""

    def append(self, path: Path, chunks: Sequence[BytesLike], *, drop_cached: bool = False) -> None:
        if path.exists():
            self.sync(path)
        super().append(path, chunks, drop_cached=drop_cached)


def cached_bytes(path: Path) -> int:
    """Of a file: what can be read without the disk. Asking brings nothing in."""
    size_bytes = path.stat().st_size
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as content:
        found = (ctypes.c_ubyte * -(-size_bytes // PAGE))()
        begin = (ctypes.c_ubyte * size_bytes).from_buffer(content)
        length = ctypes.c_size_t(size_bytes)
        failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(begin)), length, found)
        del begin  # the map can be closed again
        assert not failed, os.strerror(ctypes.get_errno())
    return PAGE * sum(one & 1 for one in found)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops what is asked")


@pytest.fixture(autouse=True)
def droppable(tmp_path: Path) -> None:
    """A file system whose pages can be dropped."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(8 * BLOCK))
    with probe.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(probe) >= 4 * BLOCK:
        pytest.skip("the file system here lives in memory: nothing of it can be dropped")
    probe.unlink()


def appended(path: Path, disk: Disk, *, drop_cached: bool) -> int:
    """Appends eight blocks; how many bytes of them are cached."""
    for _ in range(8):
        disk.append(path, [bytes(BLOCK)], drop_cached=drop_cached)
    return cached_bytes(path)


def test_written_pages_are_dropped_with_the_next_append(tmp_path: Path) -> None:
    assert BLOCK <= appended(tmp_path / "file", PromptDisk(), drop_cached=True) < 8 * BLOCK


def test_pages_stay_cached_unless_they_are_to_be_dropped(tmp_path: Path) -> None:
    assert appended(tmp_path / "file", PromptDisk(), drop_cached=False) == 8 * BLOCK
    assert appended(tmp_path / "kept", PromptDisk(keep_cached=True), drop_cached=True) == 8 * BLOCK


def test_a_sync_drops_written_pages(tmp_path: Path) -> None:
    disk = Disk()
    appended(tmp_path / "file", disk, drop_cached=True)
    disk.sync(tmp_path / "file", drop_cached=True)
    assert cached_bytes(tmp_path / "file") < 8 * BLOCK


class WatchingDisk(Disk):
    """Counts the bytes of appends that are to be dropped from the page cache."""

    def __init__(self) -> None:
        self.dropped_bytes = 0

    def append(self, path: Path, chunks: Sequence[BytesLike], *, drop_cached: bool = False) -> None:
        self.dropped_bytes += sum(map(len, chunks)) if drop_cached else 0
        super().append(path, chunks, drop_cached=drop_cached)


@pytest.mark.parametrize(
    ("steps", "step_bytes", "dropped"),
    [
        (10, LIKELY_BYTES, 1.0),  # eight of them are a part: from the first on
        (30, LIKELY_BYTES // 2, 0.4),  # when they are as many as that
        (6, LIKELY_BYTES // 2, 0.0),  # never: they are copied into a part
    ],
)
def test_episodes_that_become_a_part_are_not_kept_in_the_page_cache(
    tmp_path: Path, steps: int, step_bytes: int, dropped: float
) -> None:
    disk = WatchingDisk()
    with Output(tmp_path / "out", disk=disk) as output:
        finish(output, "a", steps=steps, text="x" * step_bytes)
        output.close()
    whole = steps * step_bytes
    assert (whole >= OWN_PART_BYTES) is bool(dropped)
    assert dropped * whole * 0.9 <= disk.dropped_bytes <= dropped * whole * 1.5
    open_rollouts(tmp_path / "out").verify()


def test_a_subclass_of_disk_need_not_set_keep_cached(tmp_path: Path) -> None:
    class Own(Disk):
        def __init__(self) -> None:
            pass

    with Output(tmp_path / "out", disk=Own()) as output:
        finish(output, "large", text="x" * OWN_PART_BYTES)
        output.close()
    open_rollouts(tmp_path / "out").verify()


@pytest.mark.parametrize("keep_cached", [False, True])
def test_large_episodes_stay_cached_after_reading_only_where_asked(
    tmp_path: Path, keep_cached: bool
) -> None:
    with Output(tmp_path / "out", disk=Disk(keep_cached=True)) as output:
        finish(output, "large", steps=24, text="x" * (OWN_PART_BYTES // 8))
        finish(output, "small", text="x" * (OWN_PART_BYTES // 8))
        output.close()
    large = next((tmp_path / "out").glob("steps-00001.jsonl"))
    small = next((tmp_path / "out").glob("steps-00000.jsonl"))
    rollouts = open_rollouts(tmp_path / "out", keep_cached=keep_cached)
    seen = {episode.id: [step.number for step in episode.steps()] for episode in rollouts}
    assert seen == {"large": list(range(24)), "small": [0, 1, 2]}
    size_bytes = large.stat().st_size
    assert cached_bytes(large) >= size_bytes if keep_cached else cached_bytes(large) < BLOCK
    assert cached_bytes(small) >= small.stat().st_size


def test_a_reader_that_stops_in_the_middle_leaves_little_in_the_page_cache(tmp_path: Path) -> None:
    with Output(tmp_path / "out", disk=Disk(keep_cached=True)) as output:
        finish(output, "large", steps=40, text="x" * BLOCK)
        output.close()
    [large] = (tmp_path / "out").glob("steps-*.jsonl")
    [episode] = open_rollouts(tmp_path / "out", keep_cached=False)
    steps = cast(Generator[StepRow], episode.steps())
    for _ in range(35):
        next(steps)
    assert cached_bytes(large) < 20 * BLOCK
    steps.close()
    assert cached_bytes(large) < 2 * BLOCK


@pytest.mark.parametrize("keep_cached", [False, True])
def test_a_large_episode_is_whole_whether_or_not_it_stays_cached(
    tmp_path: Path, keep_cached: bool
) -> None:
    with Output(tmp_path / "out", disk=PromptDisk(keep_cached=keep_cached)) as output:
        finish(output, "small", text="x" * (OWN_PART_BYTES // 8))
        finish(output, "large", steps=24, text="x" * (OWN_PART_BYTES // 8))
        output.close()
    large = next((tmp_path / "out").glob("steps-00001.jsonl"))
    # Of what may stay, the kernel takes some back when memory is short.
    assert (cached_bytes(large) > large.stat().st_size // 2) is keep_cached
    rollouts = open_rollouts(tmp_path / "out")
    rollouts.verify()
    assert [step.number for step in rollouts.episode("large").steps()] == list(range(24))
