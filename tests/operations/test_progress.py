# SPDX-License-Identifier: Apache-2.0
"""Phases with how long they took before, and what a count's rest takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openenvd.operations.base import OperationContext
from openenvd.operations.progress import (
    FILE,
    MOST_SOURCES,
    MOST_TIMES,
    LastingWait,
    Phases,
    eta_seconds,
)


class Clock:
    """A clock that tests move on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def launch(home: Path, seconds: dict[str, float], source: str = "local 1 ./my_env") -> list[Any]:
    """Go through phases that take so long; what was reported."""
    told: list[dict[str, Any]] = []
    clock = Clock()
    phases = Phases(OperationContext("id", home, told.append), source, clock)
    for phase, taken in seconds.items():
        phases.enter(phase, f"{phase} it")
        clock.now += taken
    phases.finish()
    return told


def test_a_first_run_has_no_estimate_and_the_next_one_has_the_median(tmp_path: Path) -> None:
    assert launch(tmp_path, {"resolving": 2.0, "starting": 4.0}) == [
        {"phase": "resolving", "message": "resolving it"},
        {"phase": "starting", "message": "starting it"},
    ]
    launch(tmp_path, {"resolving": 3.0})
    launch(tmp_path, {"resolving": 60.0})
    [told] = launch(tmp_path, {"resolving": 1.0})
    assert told["expected_seconds"] == 3.0
    assert "expected_seconds" not in launch(tmp_path, {"resolving": 1.0}, "another")[0]


def test_little_is_remembered_and_nothing_of_what_takes_no_time(tmp_path: Path) -> None:
    for number in range(MOST_SOURCES + 5):
        launch(tmp_path, {"starting": 1.0, "ready": 0.0}, str(number))
    for _ in range(MOST_TIMES + 2):
        launch(tmp_path, {"starting": 2.0}, "last")
    known = json.loads((tmp_path / FILE).read_text())
    assert len(known) == MOST_SOURCES
    assert [*known.values()][-1] == {"starting": [2.0] * MOST_TIMES}
    assert all("ready" not in phases for phases in known.values())
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"b": ["x"]}}', "\x00"])
def test_a_file_that_is_none_of_ours_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    launch(tmp_path, {"starting": 1.0})
    assert "expected_seconds" in launch(tmp_path, {"starting": 1.0})[0]


def test_what_uv_says_is_a_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[dict[str, Any]] = []
    phases = Phases(OperationContext("id", tmp_path, told.append), "source", Clock())
    for line in ("  uv: Resolved 43 packages in 2s", "  uv: a note", "  uv: Prepared 1 package"):
        phases.relay(line)
    assert [each["message"] for each in told] == ["downloading 43 packages", "installing 1 package"]
    assert capsys.readouterr().out.count("\n") == 3


def test_the_rest_takes_as_long_as_what_was_done() -> None:
    assert eta_seconds(10, 40, 5.0) == 15.0
    assert eta_seconds(40, 40, 5.0) == 0.0
    assert eta_seconds(0, 40, 5.0) is None
    assert eta_seconds(5, 0, 5.0) is None


def test_a_wait_that_lasts_is_said_once_with_what_ends_it_and_what_would_be_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[dict[str, Any]] = []
    wait = LastingWait(OperationContext("0123456789ab", tmp_path, reported.append))
    text, fewer = "2 of 3 replicas are ready; 1 waits: no node", "with --replicas 2 it would be"
    for seconds in (540.0, 530.0):
        wait.note(text, seconds, done=2, total=3, fewer=fewer)
    wait.note("another reason", 90.0, done=2, total=3)
    assert capsys.readouterr().out.splitlines() == [
        f"{text}; gives up in 9 min, openenv cancel 01234567 ends it; {fewer}",
        "another reason; gives up in 90 s, openenv cancel 01234567 ends it",
    ]
    assert [each["at_most_seconds"] for each in reported] == [540.0, 530.0, 90.0]
    assert reported[0] | {"at_most_seconds": 0} == {
        "phase": "waiting",
        "message": text,
        "done": 2,
        "total": 3,
        "at_most_seconds": 0,
    }
