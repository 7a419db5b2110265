# SPDX-License-Identifier: Apache-2.0
"""Appends past the page cache: every byte in its place, whatever the file system thinks of it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.folder import direct_io
from openenvd.rollouts.folder.direct_io import (
    BLOCK_BYTES,
    DIRECT,
    GATHERED_BYTES,
    LEAST_BYTES,
    REFUSED,
    PastCache,
)
from openenvd.rollouts.folder.disk import Disk

PLACES = [path for path in (None, Path("/dev/shm")) if path is None or path.is_dir()]

Write = Callable[[int, Sequence[BytesLike]], None]


@pytest.fixture(params=PLACES, ids=str)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file on the disk, and one in memory."""
    found = tmp_path / "file" if request.param is None else request.param / f"o{os.getpid()}"
    yield found
    found.unlink(missing_ok=True)


def some(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def append(
    past: PastCache, path: Path, chunks: Sequence[BytesLike], write: Write | None = None
) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        went = past.append(descriptor, chunks, write or Disk().write)
        assert not is_direct(descriptor)
    finally:
        os.close(descriptor)
    return went


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_of_all_sizes_lie_one_after_the_other(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    past, wanted = PastCache(), b""
    for _ in range(12):
        sizes = [chance.choice((0, 1, 100, 4095, 4096, 70_000, 1_100_000)) for _ in range(5)]
        chunks = [chance.randbytes(size) for size in sizes]
        append(past, path, [memoryview(chunks[0]), bytearray(chunks[1]), *chunks[2:]])
        wanted += b"".join(chunks)
    assert path.read_bytes() == wanted


@pytest.mark.parametrize("before", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
@pytest.mark.parametrize("size", [LEAST_BYTES, GATHERED_BYTES, GATHERED_BYTES * 2 + 5])
def test_only_whole_blocks_go_past_the_cache(path: Path, before: int, size: int) -> None:
    written: list[tuple[bool, int]] = []

    def write(descriptor: int, chunks: Sequence[BytesLike]) -> None:
        written.append((is_direct(descriptor), sum(map(len, chunks))))
        Disk().write(descriptor, chunks)

    path.write_bytes(some(before))
    past = PastCache()
    went = append(past, path, [some(size + BLOCK_BYTES, 1)], write)
    assert path.read_bytes() == some(before) + some(size + BLOCK_BYTES, 1)
    direct = [count for is_so, count in written if is_so]
    if not went:
        pytest.skip("the file system here cannot write past its cache")
    assert all(count % BLOCK_BYTES == 0 for count in direct)
    assert sum(direct) >= size + BLOCK_BYTES - 2 * (BLOCK_BYTES - 1)
    assert max(direct) <= GATHERED_BYTES


def test_a_little_is_not_worth_it(path: Path) -> None:
    assert not append(PastCache(), path, [some(LEAST_BYTES - 1)])
    assert path.read_bytes() == some(LEAST_BYTES - 1)


def test_nothing_is_nothing(path: Path) -> None:
    assert not append(PastCache(), path, [])
    assert not append(PastCache(), path, [b"", b""])
    assert path.read_bytes() == b""


@pytest.mark.parametrize("code", REFUSED)
@pytest.mark.parametrize("taken_bytes", [0, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_a_file_system_that_refuses_when_it_is_written_to(
    path: Path, taken_bytes: int, code: int
) -> None:
    """It may have taken some of it."""
    refused = []

    def write(descriptor: int, chunks: Sequence[BytesLike]) -> None:
        if is_direct(descriptor):
            refused.append(len(chunks[0]))
            Disk().write(descriptor, [memoryview(chunks[0])[:taken_bytes]])
            raise OSError(code, os.strerror(code))
        Disk().write(descriptor, chunks)

    past = PastCache()
    for seed in range(3):
        assert not append(past, path, [some(2 * GATHERED_BYTES + 7, seed)], write)
    assert path.read_bytes() == b"".join(some(2 * GATHERED_BYTES + 7, seed) for seed in range(3))
    assert len(refused) <= 1  # it is not tried again


def test_a_file_system_that_refuses_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_set_direct", lambda *_: False)
    past = PastCache()
    assert not append(past, path, [some(GATHERED_BYTES)])
    assert not append(past, path, [some(GATHERED_BYTES, 1)])
    assert path.read_bytes() == some(GATHERED_BYTES) + some(GATHERED_BYTES, 1)


def test_a_system_that_knows_nothing_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "DIRECT", 0)
    assert not append(PastCache(), path, [some(GATHERED_BYTES)])
    assert path.read_bytes() == some(GATHERED_BYTES)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EINVAL, errno.EIO])
def test_other_errors_are_told(path: Path, code: int) -> None:
    def write(descriptor: int, chunks: Sequence[BytesLike]) -> None:
        if chunks:
            raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=os.strerror(code)):
        append(PastCache(), path, [some(GATHERED_BYTES)], write)


def test_a_forked_process_gathers_in_memory_of_its_own(tmp_path: Path) -> None:
    past = PastCache()
    append(past, tmp_path / "before", [some(GATHERED_BYTES)])
    going, gone = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.read(going[0], 1)
            append(past, tmp_path / "child", [b"c" * GATHERED_BYTES])
            os.write(gone[1], b".")
        finally:
            os._exit(0)

    def write(descriptor: int, chunks: Sequence[BytesLike]) -> None:
        os.write(going[1], b".")
        os.read(gone[0], 1)
        Disk().write(descriptor, chunks)

    append(past, tmp_path / "parent", [b"p" * GATHERED_BYTES], write)
    os.waitpid(child, 0)
    for descriptor in (*going, *gone):
        os.close(descriptor)
    assert (tmp_path / "parent").read_bytes() == b"p" * GATHERED_BYTES
    assert (tmp_path / "child").read_bytes() == b"c" * GATHERED_BYTES
