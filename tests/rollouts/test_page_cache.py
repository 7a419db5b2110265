# SPDX-License-Identifier: Apache-2.0
"""What is large passes through the page cache, as far as the kernel has written it back."""

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
from openenvd.rollouts.folder import direct_io
from openenvd.rollouts.folder.direct_io import PastCache
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.rows import StepRow
from openenvd.rollouts.folder.spool import OWN_PART_BYTES

from .made import finish

BLOCK = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None, use_errno=True)


class PromptDisk(Disk):
    """Has written back whatever it was given: the kernel's own pace is nobody's to know."""

    def append(
        self, path: Path, chunks: Sequence[BytesLike], *, past: PastCache | None = None
    ) -> None:
        if path.exists():
            self.sync(path)
        super().append(path, chunks, past=past)


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


def appended(path: Path, disk: Disk, *, passes: bool) -> int:
    """Eight blocks, one after the other; what is cached of them."""
    past = PastCache() if passes else None
    for _ in range(8):
        disk.append(path, [bytes(BLOCK)], past=past)
    return cached_bytes(path)


@pytest.fixture
def no_way_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system where everything goes through the cache."""
    monkeypatch.setattr(direct_io, "DIRECT", 0)


@pytest.mark.usefixtures("direct")
def test_what_passes_is_never_cached(tmp_path: Path) -> None:
    assert appended(tmp_path / "file", Disk(), passes=True) == 0


@pytest.mark.usefixtures("no_way_past")
def test_what_passes_is_dropped_when_more_comes(tmp_path: Path) -> None:
    assert BLOCK <= appended(tmp_path / "file", PromptDisk(), passes=True) < 8 * BLOCK


def test_what_does_not_pass_stays(tmp_path: Path) -> None:
    assert appended(tmp_path / "file", PromptDisk(), passes=False) == 8 * BLOCK
    assert appended(tmp_path / "kept", PromptDisk(keep_cached=True), passes=True) == 8 * BLOCK


@pytest.mark.usefixtures("no_way_past")
def test_one_that_is_synced_has_passed(tmp_path: Path) -> None:
    disk = Disk()
    appended(tmp_path / "file", disk, passes=True)
    disk.sync(tmp_path / "file", passes=True)
    assert cached_bytes(tmp_path / "file") < 8 * BLOCK


def test_a_disk_of_ones_own_need_not_know_of_it(tmp_path: Path) -> None:
    class Own(Disk):
        def __init__(self) -> None:
            pass

    with Output(tmp_path / "out", disk=Own()) as output:
        finish(output, "large", text="x" * OWN_PART_BYTES)
        output.close()
    open_rollouts(tmp_path / "out").verify()


@pytest.mark.parametrize("keep_cached", [False, True])
def test_large_episodes_are_read_and_pass_or_stay(tmp_path: Path, keep_cached: bool) -> None:
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


def test_a_reader_that_passes_leaves_little_behind_wherever_it_is(tmp_path: Path) -> None:
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
def test_a_large_episode_passes_and_all_of_it_is_there(tmp_path: Path, keep_cached: bool) -> None:
    with Output(tmp_path / "out", disk=PromptDisk(keep_cached=keep_cached)) as output:
        finish(output, "small", text="x" * (OWN_PART_BYTES // 8))
        finish(output, "large", steps=24, text="x" * (OWN_PART_BYTES // 8))
        output.close()
    large = next((tmp_path / "out").glob("steps-00001.jsonl"))
    assert (cached_bytes(large) >= large.stat().st_size) is keep_cached
    rollouts = open_rollouts(tmp_path / "out")
    rollouts.verify()
    assert [step.number for step in rollouts.episode("large").steps()] == list(range(24))
