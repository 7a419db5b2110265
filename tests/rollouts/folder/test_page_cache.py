# SPDX-License-Identifier: Apache-2.0
"""Large files are dropped from the page cache, as far as the kernel has written them back."""

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
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.rows import LARGE_BYTES, StepRow
from openenvd.rollouts.folder.writer import RolloutWriter

from ..made import finish

BLOCK = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LIBC = ctypes.CDLL(None, use_errno=True)


class PromptDisk(Disk):
    """Writes back each append before the next: when the kernel does so by itself is not known."""

    def append(self, path: Path, chunks: Sequence[BytesLike], *, write_back: bool = False) -> None:
        if path.exists():
            self.sync(path)
        super().append(path, chunks, write_back=write_back)


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
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(8 * BLOCK))
    with probe.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(probe) >= 4 * BLOCK:
        pytest.skip("the file system here lives in memory: nothing of it can be dropped")
    probe.unlink()


async def test_large_episodes_do_not_stay_cached(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path / "out", disk=PromptDisk()) as writer:
        await finish(writer, "small", text="x" * (LARGE_BYTES // 8))
        await finish(writer, "large", steps=24, text="x" * (LARGE_BYTES // 8))
    large = tmp_path / "out" / "episodes" / "large.jsonl"
    assert cached_bytes(large) <= large.stat().st_size // 2
    rollouts = open_rollouts(tmp_path / "out")
    rollouts.verify()
    assert [step.number for step in rollouts.episode("large").steps()] == list(range(24))


@pytest.mark.parametrize("keep_cached", [False, True])
async def test_large_episodes_stay_cached_after_reading_only_where_asked(
    tmp_path: Path, keep_cached: bool
) -> None:
    async with await RolloutWriter.open(tmp_path / "out") as writer:
        await finish(writer, "large", steps=24, text="x" * (LARGE_BYTES // 8))
        await finish(writer, "small", text="x" * (LARGE_BYTES // 8))
    for path in (tmp_path / "out").glob("*/*.jsonl"):
        Disk().sync(path)
        path.read_bytes()
    rollouts = open_rollouts(tmp_path / "out", keep_cached=keep_cached)
    seen = {episode.id: [step.number for step in episode.steps()] for episode in rollouts}
    assert seen == {"large": list(range(24)), "small": [0, 1, 2]}
    large, small = ((tmp_path / "out" / "episodes" / f"{n}.jsonl") for n in ("large", "small"))
    size_bytes = large.stat().st_size
    assert cached_bytes(large) >= size_bytes if keep_cached else cached_bytes(large) < BLOCK
    assert cached_bytes(small) >= small.stat().st_size


async def test_a_reader_that_stops_early_leaves_little_in_the_page_cache(tmp_path: Path) -> None:
    async with await RolloutWriter.open(tmp_path / "out") as writer:
        await finish(writer, "large", steps=40, text="x" * BLOCK)
    large = tmp_path / "out" / "episodes" / "large.jsonl"
    Disk().sync(large)
    large.read_bytes()
    [episode] = open_rollouts(tmp_path / "out", keep_cached=False)
    steps = cast(Generator[StepRow], episode.steps())
    for _ in range(35):
        next(steps)
    assert cached_bytes(large) < 20 * BLOCK
    steps.close()
    assert cached_bytes(large) < 2 * BLOCK
