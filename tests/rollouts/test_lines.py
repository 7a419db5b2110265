# SPDX-License-Identifier: Apache-2.0
"""The lines of a stretch are what Python's own reading makes of it, however they lie in blocks."""

from __future__ import annotations

import tracemalloc
from io import FileIO
from pathlib import Path

import pytest

from openenvd.rollouts.folder.lines import lines

SHAPES = [
    [0],
    [5],
    [15, 15, 15],  # each with its end fills a block
    [16, 3],
    [31, 1, 0, 200, 7, 0, 0],
    [1] * 100,
    [1000, 1, 1000],
]


def written(folder: Path, sizes: list[int]) -> Path:
    """Lines of those sizes, each of a letter of its own."""
    path = folder / "file"
    path.write_bytes(b"".join(b"%c" % (97 + n % 26) * s + b"\n" for n, s in enumerate(sizes)))
    return path


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("block_bytes", [1, 2, 16, 1 << 20])
def test_lines_are_whole_for_every_block_size(
    tmp_path: Path, sizes: list[int], block_bytes: int
) -> None:
    path = written(tmp_path, sizes)
    with FileIO(path) as file:
        found = list(lines(file, 0, path.stat().st_size, block_bytes=block_bytes))
    assert found == path.read_bytes().splitlines()


@pytest.mark.parametrize("block_bytes", [2, 16])
def test_only_the_lines_of_the_stretch_are_read(tmp_path: Path, block_bytes: int) -> None:
    path = written(tmp_path, [10, 20, 30, 40])
    with FileIO(path) as file:
        assert list(lines(file, 11, 21 + 31, block_bytes=block_bytes)) == [b"b" * 20, b"c" * 30]


def test_a_file_may_be_shorter_than_the_stretch_and_lack_the_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntw")
    with FileIO(path) as file:
        assert list(lines(file, 0, 1000)) == [b"one", b"tw"]
    path.write_bytes(b"")
    with FileIO(path) as file:
        assert list(lines(file, 0, 1000)) == []


def test_kept_lines_do_not_change(tmp_path: Path) -> None:
    """The buffer is used again; a line is its owner's."""
    path = written(tmp_path, [100_000] * 10)
    with FileIO(path) as file:
        kept = list(lines(file, 0, path.stat().st_size))
    assert [line[:1] for line in kept] == [b"%c" % (97 + n) for n in range(10)]


def test_memory_is_bounded_by_the_longest_line(tmp_path: Path) -> None:
    longest = 1 << 20
    path = written(tmp_path, [longest] * 30)
    with FileIO(path) as file:
        tracemalloc.start()
        for _ in lines(file, 0, path.stat().st_size):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 6 * longest
