# SPDX-License-Identifier: Apache-2.0
"""`openenv bench`: what is asked for, and what is refused before it is."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from openenvd.cli.following import BAR_WIDTH, drawn_phase, phase_line

from .conftest import Command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests-grid", ""], "not a list of whole numbers"),
        (["--requests-grid", "1.5"], "not a list of whole numbers"),
        (["--wait-grid", "soon"], "not a list of durations"),
        (["--reps", "0"], "--reps"),
        (["--action", "{"], "not JSON"),
        (["--action", "[1]"], "JSON object"),
    ],
)
def test_nonsense_is_refused_without_a_daemon(
    command: Command, arguments: list[str], words: str
) -> None:
    answer = command("bench", "echo", *arguments)
    assert answer.code == 2
    assert words in answer.err


def drawn(progress: dict[str, Any]) -> str:
    """What a terminal without colours shows of a launch that is so far."""
    stream = io.StringIO()
    console = Console(file=stream, width=100, no_color=True, force_terminal=False)
    console.print(drawn_phase({"label": "launch [red]trial", "state": "RUNNING"}, progress))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("progress", "filled", "words"),
    [
        ({"done": 0, "total": 4}, 0, "0 %"),
        ({"done": 1, "total": 4}, BAR_WIDTH // 4, "25 %"),
        ({"done": 9, "total": 4}, BAR_WIDTH, "100 %"),
    ],
)
def test_the_bar_is_as_long_as_the_work_is_done(
    progress: dict[str, float], filled: int, words: str
) -> None:
    assert drawn(progress).count("━") == filled
    assert f" {words} launch [red]trial: running" in drawn(progress)


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        ({"message": "at it"}, "launch trial: at it"),
        ({"message": "at it", "expected_seconds": 12.3}, "launch trial: at it, usually 12 s"),
        ({"message": "at it", "eta_seconds": 90.0}, "launch trial: at it, about 1 min left"),
    ],
)
def test_an_estimate_is_shown_where_there_is_one(progress: dict[str, Any], shown: str) -> None:
    assert phase_line({"label": "launch trial", "state": "RUNNING"}, progress) == shown


@pytest.mark.parametrize("progress", [{}, {"done": 1}, {"done": 0, "total": 0}, {"done": "x"}])
def test_there_is_no_bar_without_a_total(progress: dict[str, float]) -> None:
    assert drawn(progress) == "launch [red]trial: running\n"
