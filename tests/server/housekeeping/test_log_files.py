# SPDX-License-Identifier: Apache-2.0
"""Reading logs from the end, and following them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from openenvd.server.events.log_files import (
    LOOK_SECONDS,
    LogFile,
    followed,
    offset_of_last_lines,
)


@pytest.mark.parametrize(
    ("content", "count", "tail"),
    [
        (b"", 3, b""),
        (b"one\n", 3, b"one\n"),
        (b"one\ntwo\nthree\n", 2, b"two\nthree\n"),
        (b"one\ntwo\nthree", 2, b"two\nthree"),
        (b"one\ntwo\nthree", 1, b"three"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"one\ntwo\n", 2, b"one\ntwo\n"),
    ],
)
def test_the_last_lines_begin_where_they_begin(
    tmp_path: Path, content: bytes, count: int, tail: bytes
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert content[offset_of_last_lines(path, count) :] == tail


def test_the_last_lines_of_a_log_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"line {number} {'x' * 90}\n".encode() for number in range(5000)]
    path.write_bytes(b"".join(lines))
    assert path.read_bytes()[offset_of_last_lines(path, 1500) :] == b"".join(lines[-1500:])


@pytest.mark.parametrize("content", [b"", b"one\ntwo\n", b"one\ntw"])
def test_no_lines_means_the_end(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert offset_of_last_lines(path, 0) == len(content)


@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100])
def test_last_lines_across_blocks_are_those_that_splitting_gives(
    tmp_path: Path, count: int, ending: bytes
) -> None:
    path = tmp_path / "log"
    content = b"\n".join([b"", b"a", b"bcd", b"efghij", b"", b"k", b"lmnopqrs", b"t"]) + ending
    path.write_bytes(content)
    expected = b"".join(content.splitlines(keepends=True)[-count:])
    assert content[offset_of_last_lines(path, count, block_bytes=4) :] == expected


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    assert offset_of_last_lines(tmp_path / "none", 5) == 0
    assert LogFile(tmp_path / "none").read() == ""


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    path.write_bytes(b"whole\nhal")
    assert log.read() == "whole\n"
    path.write_bytes(b"whole\nhalf\n")
    assert log.read() == "half\n"


def test_the_end_of_a_log_includes_its_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"whole\nhal")
    assert "".join(LogFile(path).read_all()) == "whole\nhal"


def test_a_line_longer_than_one_read_still_arrives(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 600_000 + b"\n")
    assert len("".join(LogFile(path).read_all())) == 600_001


def test_a_log_that_was_cut_is_read_on_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    log = LogFile(path)
    log.read()
    path.write_bytes(b"cut\n")
    assert log.read() == ""
    with path.open("ab") as file:
        file.write(b"three\n")
    assert log.read() == "three\n"


async def test_a_follower_is_woken_by_each_write_and_not_by_its_neighbours(tmp_path: Path) -> None:
    wake, path = asyncio.Event(), tmp_path / "log"
    with followed(path, wake):
        (tmp_path / "other").write_bytes(b"one\n")
        await asyncio.sleep(3 * LOOK_SECONDS)
        assert not wake.is_set()
        for text in (b"one\n", b"one\ntwo\n", b"o\n"):  # made, written to, cut
            path.write_bytes(text)
            await asyncio.wait_for(wake.wait(), 10)
            wake.clear()


async def test_two_followers_of_one_log_are_both_woken_until_they_leave(tmp_path: Path) -> None:
    first, second, path = asyncio.Event(), asyncio.Event(), tmp_path / "log"
    before = asyncio.all_tasks()
    with followed(path, first), followed(path, second):
        path.write_bytes(b"one\n")
        await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), 10)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
