# SPDX-License-Identifier: Apache-2.0
"""Which logs are removed. SkyPilot #10023: logs filled the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openenvd.server.api.routes_environments import oldest_first
from openenvd.server.dispatch.janitor import Log, logs_of, to_remove
from openenvd.server.settings import Paths


def log(name: str, size: int, written_at: float, *, of_request: bool = False) -> Log:
    return Log(Path(f"/logs/{name}.log"), size, written_at, of_request)


LOGS = [log("c", 30, 3.0), log("a", 10, 1.0), log("b", 20, 2.0, of_request=True)]


@pytest.mark.parametrize(
    ("oldest", "most_bytes", "running", "gone"),
    [
        (0.0, 60, "", ""),  # all fit
        (0.0, 59, "", "a"),  # the oldest first, and no more than needed
        (0.0, 31, "", "ab"),
        (0.0, 0, "b", "ac"),  # what runs keeps its log
        (2.5, 99, "", "a"),  # of requests the database tells who is too old
        (2.5, 99, "a", ""),
    ],
)
def test_the_oldest_logs_are_removed_except_those_of_running_requests(
    oldest: float, most_bytes: int, running: str, gone: str
) -> None:
    removed = to_remove(LOGS, running, oldest=oldest, most_bytes=most_bytes)
    assert [path.stem for path in removed] == list(gone)


def test_logs_of_requests_and_of_replicas_are_found(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    replica = paths.replica_log("trial", "trial-0-1234")
    for path in (paths.request_log("abcd"), replica):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
        os.utime(path, (7.0, 7.0))
    found = sorted(logs_of(paths), key=lambda each: each.path.stem)
    assert [(f.path.stem, *f[1:]) for f in found] == [
        ("abcd", 5, 7.0, True),
        ("trial-0-1234", 5, 7.0, False),
    ]


def test_a_log_that_is_removed_while_logs_are_looked_through_is_left_out(tmp_path: Path) -> None:
    gone, new, old = (tmp_path / f"{name}.log" for name in ("gone", "new", "old"))
    for path, written_at in ((new, 9.0), (old, 7.0)):
        path.touch()
        os.utime(path, (written_at, written_at))
    assert oldest_first([gone, new, old]) == [old, new]
