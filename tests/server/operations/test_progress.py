# SPDX-License-Identifier: Apache-2.0
"""Phases, and what a count's rest takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openenvd.environments.engines.started_replicas import StartedReplica
from openenvd.server.operations import base
from openenvd.server.operations.base import OperationContext, ReplicasAwaited, eta_seconds

CLOCK: Any = SimpleNamespace(now=100.0, monotonic=lambda: CLOCK.now)


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "time", CLOCK)


def test_what_uv_says_is_a_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[dict[str, Any]] = []
    context = OperationContext("id", tmp_path, told.append)
    for line in ("  uv: Resolved 43 packages in 2s", "  uv: a note", "  uv: Prepared 1 package"):
        context.relay(line)
    assert [each["message"] for each in told] == ["downloading 43 packages", "installing 1 package"]
    assert capsys.readouterr().out.count("\n") == 3


def test_the_rest_takes_as_long_as_what_was_done() -> None:
    assert eta_seconds(10, 40, 5.0) == 15.0
    assert eta_seconds(40, 40, 5.0) == 0.0
    assert eta_seconds(0, 40, 5.0) is None
    assert eta_seconds(5, 0, 5.0) is None


def test_a_wait_that_lasts_is_said_once_with_what_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[dict[str, Any]] = []
    context = OperationContext("0123456789ab", tmp_path, reported.append)
    awaited = ReplicasAwaited(context, 2)
    awaited.on_ready(StartedReplica("trial-0", 0, pid=7))
    for line in ("loading weights", "loading weights", "x" * 200, ""):
        awaited.on_line(line)
    for reason, seconds in (("no node", 540.0), ("no node", 530.0), ("no image", 90.0)):
        awaited.on_lasting(reason, seconds)
    ready, *said = capsys.readouterr().out.splitlines()
    assert ready.startswith("replica 0 (pid 7) is ready (")
    ends = "openenv cancel 01234567 ends it"
    assert said == [f"no node; gives up in 9 min, {ends}", f"no image; gives up in 90 s, {ends}"]
    counts = {"phase": "waiting", "done": 1, "total": 2}
    assert reported == [
        {**counts, "message": "1 of 2 replicas ready"},
        {**counts, "message": "1 of 2 replicas ready: loading weights"},
        {**counts, "message": f"1 of 2 replicas ready: {'x' * 100}"},
        {**counts, "message": "no node", "at_most_seconds": 540.0},
        {**counts, "message": "no node", "at_most_seconds": 530.0},
        {**counts, "message": "no image", "at_most_seconds": 90.0},
    ]
