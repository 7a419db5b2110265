# SPDX-License-Identifier: Apache-2.0
"""Variables of the command line, and of files."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from openenvd.cli.options import read_env_files, read_variables


def test_variables_are_given_or_taken_from_here() -> None:
    given = ("A=1", "B=", "C", "D=x=y")
    found = read_variables(given, {"C": "here"})
    assert found == {"A": "1", "B": "", "C": "here", "D": "x=y"}


@pytest.mark.parametrize("text", ["MISSING", "=x", ""])
def test_a_variable_that_has_no_value_anywhere_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="KEY=VALUE"):
        read_variables((text,), {})


def test_variables_are_read_from_files_as_docker_reads_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first.env", tmp_path / "second.env"
    first.write_bytes(
        b'\xef\xbb\xbf# a comment\n\nA=1\r\n  B=two words # all of it\nC="quoted"\nHERE\nNOT_HERE\n'
        b"D=\nE=a=b\n"
    )
    second.write_text("A=2")
    found = read_env_files((str(first), str(second)), {"HERE": "here"})
    assert found == {
        "A": "2",
        "B": "two words # all of it",
        "C": '"quoted"',
        "HERE": "here",
        "D": "",
        "E": "a=b",
    }


@pytest.mark.parametrize("line", ["=x", "A B=1", "export A=1"])
def test_a_line_that_is_no_variable_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "some.env"
    path.write_text(f"A=1\n{line}\n")
    with pytest.raises(click.BadParameter, match=r"some\.env:2: "):
        read_env_files((str(path),), {})


def test_a_file_of_variables_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="missing"):
        read_env_files((str(tmp_path / "missing"),), {})
