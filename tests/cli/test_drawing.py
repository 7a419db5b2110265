# SPDX-License-Identifier: Apache-2.0
"""Tables and lines: aligned as rich does it, and left to rich where something must be folded."""

from __future__ import annotations

import io
import subprocess
import sys

import click
import pytest
from rich.console import Console

from openenvd.cli.output.drawing import Cell, Table, draw

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


def test_drawing_a_table_imports_no_rich() -> None:
    script = """
import sys
from openenvd.cli.output.drawing import Table, draw
table = Table("NAME", "STATE")
for number in range(1000):
    table.add_row(f"name-{number}", "READY")
draw([table], sys.stdout)
sys.exit("rich" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "name-999  READY"
