# SPDX-License-Identifier: Apache-2.0
"""Which logs are removed. SkyPilot #10023: logs filled the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openenvd.schema.settings import Paths
from openenvd.server.api.routes_environments import oldest_first
from openenvd.server.dispatch.janitor import Log, logs_of, to_remove


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


def test_a_log_that_is_removed_while_logs_are_looked_through_is_left_out(tmp_path: Path) -> None:
    gone, new, old = (tmp_path / f"{name}.log" for name in ("gone", "new", "old"))
    for path, written_at in ((new, 9.0), (old, 7.0)):
        path.touch()
        os.utime(path, (written_at, written_at))
    assert oldest_first([gone, new, old], None) == [old, new]


def test_the_log_of_the_latest_launch_is_the_newest_though_the_clock_stepped_back(
    tmp_path: Path,
) -> None:
    former, latest = tmp_path / "trial-0-1234.log", tmp_path / "trial-0-5678.log"
    for path, written_at in ((former, 86_400.0), (latest, 7.0)):
        path.touch()
        os.utime(path, (written_at, written_at))
    assert oldest_first([latest, former], "5678") == [former, latest]
