# SPDX-License-Identifier: Apache-2.0
"""Large files are dropped from the page cache, as far as the kernel has written them back."""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.rows import LARGE_BYTES
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
