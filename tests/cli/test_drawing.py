# SPDX-License-Identifier: Apache-2.0
"""Tables and lines, left to rich where something must be folded; and bars of progress."""

from __future__ import annotations

import io
from typing import Any

import click
import pytest
from rich.console import Console

from openenvd.cli.following import BAR_WIDTH, drawn_phase, phase_line
from openenvd.cli.output.output import Cell, Table, draw

WIDE = 10_000


@pytest.fixture
def table() -> Table:
    table = Table("NAME", "STATE", "ADDRESS", "")
    table.add_row("echo", Cell("READY", {"fg": "green"}), "http://127.0.0.1:8000", "")
    table.add_row("a-longer-name", Cell("FAILED", {"fg": "red"}), "-", "its port is taken")
    table.add_row("", "", "", "")
    return table


def drawn_by_rich(table: Table, width: int = WIDE) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip(" ") for line in captured.get().splitlines()]


def test_aligned_lines_are_those_that_rich_would_draw(table: Table) -> None:
    lines = table.lines(WIDE)
    assert lines is not None
    assert [click.unstyle(line) for line in lines] == drawn_by_rich(table)
    assert "\x1b[32mREADY\x1b[0m " in lines[1]


def test_a_table_that_does_not_fit_is_left_to_rich(table: Table) -> None:
    assert table.lines(40) is None


def test_a_narrow_terminal_shows_fewer_columns_and_folds_the_remark_alone() -> None:
    table = Table("REQUEST", "ID", "STATE", "WHEN", "")
    table.add_row(
        "rollout other_env", "8f3a91c2", "FAILED", "in 1.0 s, 1 min ago", "killed for its memory"
    )
    assert drawn_by_rich(table, 72) == [
        "REQUEST            ID        STATE   WHEN",
        "rollout other_env  8f3a91c2  FAILED  in 1.0 s, 1 min ago  killed for its",
        " " * 58 + "memory",
    ]
    assert drawn_by_rich(table, 55) == [
        "REQUEST            ID        STATE",
        "rollout other_env  8f3a91c2  FAILED  killed for its",
        " " * 37 + "memory",
    ]


@pytest.mark.parametrize("text", ["é", "日本", "two\nlines", "tab\tbed"])
def test_what_may_not_take_one_column_a_character_is_left_to_rich(text: str) -> None:
    table = Table("NAME")
    table.add_row(text)
    assert table.lines(WIDE) is None
    stream = io.StringIO()
    draw(["before", table, "after"], stream)
    assert stream.getvalue().splitlines()[:2] == ["before", "NAME"]
    assert text.split()[-1] in stream.getvalue()


def test_off_a_terminal_nothing_is_coloured_and_nothing_folded(table: Table) -> None:
    stream = io.StringIO()
    line = "word " * 100 + "end"
    draw([click.style(line, dim=True), "", table], stream)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [line, ""]
    assert "\x1b" not in stream.getvalue()


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
