# SPDX-License-Identifier: Apache-2.0
"""Logs: reading them from the end, following them, and which are removed."""

import asyncio
import os
from pathlib import Path

import pytest

from openenvd.schema.settings import Paths
from openenvd.server.api.routes_environments import oldest_first
from openenvd.server.dispatch.janitor import Log, logs_of, to_remove
from openenvd.server.events import POLL_INTERVAL_SECONDS, LogFile, followed, offset_of_last_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a log, which is not there yet."""
    return tmp_path / "log"


LINES = b"\n".join([b"", b"a", b"bcd", b"efghij", b"", b"k", b"lmnopqrs", b"t"])
LONG = b"".join(f"line {number} {'x' * 90}\n".encode() for number in range(5000))


@pytest.mark.parametrize(
    ("content", "counts", "block_bytes"),
    [
        (b"", (1, 3), 4),
        (b"one\n", (3,), 4),
        (b"one\ntwo\nthree\n", (2, 3), 1 << 16),
        (b"one\ntwo\nthree", (1, 2), 1 << 16),
        (b"\n\n\n", (2,), 1 << 16),
        (LINES, (1, 2, 7, 8, 9, 100), 4),
        (LINES + b"\n", (1, 2, 7, 8, 9, 100), 4),
        (LONG, (1500,), 1 << 16),
    ],
)
def test_last_lines_are_those_that_splitting_gives_and_none_means_the_end(
    path: Path, content: bytes, counts: tuple[int, ...], block_bytes: int
) -> None:
    path.write_bytes(content)
    for count in counts:
        expected = b"".join(content.splitlines(keepends=True)[-count:])
        assert content[offset_of_last_lines(path, count, block_bytes=block_bytes) :] == expected
    assert offset_of_last_lines(path, 0) == len(content)


def test_a_log_is_read_by_line_absent_unfinished_long_or_cut(path: Path) -> None:
    assert offset_of_last_lines(path, 5) == 0
    assert "".join(LogFile(path).pieces()) == ""
    log = LogFile(path)
    path.write_bytes(b"whole\nhal")
    assert "".join(log.pieces()) == "whole\n"
    path.write_bytes(b"whole\nhalf\n")
    assert "".join(log.pieces()) == "half\n"
    path.write_bytes(b"whole\nhal")
    assert "".join(LogFile(path).pieces(final=True)) == "whole\nhal"
    path.write_bytes(b"x" * 600_000 + b"\n")
    assert len("".join(LogFile(path).pieces(final=True))) == 600_001
    path.write_bytes(b"one\ntwo\n")
    log = LogFile(path)
    assert "".join(log.pieces()) == "one\ntwo\n"
    path.write_bytes(b"cut\n")
    assert "".join(log.pieces()) == ""
    with path.open("ab") as file:
        file.write(b"three\n")
    assert "".join(log.pieces()) == "three\n"


async def test_followers_are_woken_by_each_write_of_their_log_alone(path: Path) -> None:
    wake, before = asyncio.Event(), asyncio.all_tasks()
    with followed(path, wake):
        path.with_name("other").write_bytes(b"one\n")
        await asyncio.sleep(3 * POLL_INTERVAL_SECONDS)
        assert not wake.is_set()
        for text in (b"one\n", b"one\ntwo\n", b"o\n"):  # made, written to, cut
            path.write_bytes(text)
            await asyncio.wait_for(wake.wait(), 10)
            wake.clear()
    first, second = asyncio.Event(), asyncio.Event()
    with followed(path, first), followed(path, second):
        path.write_bytes(b"one\n")
        await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), 10)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def log(stem: str, size: int) -> Log:
    return Log(Path(f"/logs/{stem}.log"), size, stem.rpartition("-")[2])


# By the last event of each, `old` first; `x-0-new` is a replica of the request `new`.
LAST_EVENTS = {"new": 3, "old": 1, "mid": 2}
LOGS = [log("x-0-new", 30), log("old", 10), log("mid", 20)]


@pytest.mark.parametrize(
    ("ended", "most_bytes", "running", "gone"),
    [
        ((), 60, (), []),  # all fit
        ((), 59, (), ["old"]),  # the oldest first, and no more than needed
        ((), 31, (), ["old", "mid"]),
        ((), 0, ("mid",), ["old", "x-0-new"]),  # what runs keeps its log
        (("new",), 99, (), []),  # the environment that it launched is still known
        (("gone",), 99, (), ["x-1-gone"]),
        (("gone",), 99, ("x-1-gone",), []),
    ],
)
def test_the_oldest_logs_are_removed_except_those_of_running_requests(
    ended: tuple[str, ...], most_bytes: int, running: tuple[str, ...], gone: list[str]
) -> None:
    logs = [*LOGS, log("x-1-gone", 0)] if ended else LOGS
    removed = to_remove(logs, running, ended, LAST_EVENTS, most_bytes=most_bytes)
    assert [path.stem for path in removed] == gone


def test_logs_of_requests_and_of_replicas_are_found(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    replica = paths.replica_log("trial", "my-trial-0-1234")
    for path in (paths.request_log("abcd"), replica):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
    found = sorted(logs_of(paths), key=lambda each: each.path.stem)
    assert [(f.path.stem, *f[1:]) for f in found] == [
        ("abcd", 5, "abcd"),
        ("my-trial-0-1234", 5, "1234"),
    ]


def test_a_removed_log_is_left_out_and_the_latest_launchs_is_newest(tmp_path: Path) -> None:
    gone, new, old = (tmp_path / f"{name}.log" for name in ("gone", "new", "old"))
    for path, written_at in ((new, 9.0), (old, 7.0)):
        path.touch()
        os.utime(path, (written_at, written_at))
    assert oldest_first([gone, new, old], None) == [old, new]
    former, latest = tmp_path / "trial-0-1234.log", tmp_path / "trial-0-5678.log"
    for path, written_at in ((former, 86_400.0), (latest, 7.0)):
        path.touch()
        os.utime(path, (written_at, written_at))
    assert oldest_first([latest, former], "5678") == [former, latest]
