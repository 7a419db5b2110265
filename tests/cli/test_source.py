# SPDX-License-Identifier: Apache-2.0
"""What is launched, and what it is called."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from openenvd.cli import source
from openenvd.environments.names import suggest_name

BUNDLED = frozenset({"echo"})


def read(text: str, here: Path) -> source.Source:
    return source.read_source(text, here, BUNDLED)


def test_a_bundled_name_is_sent_as_it_is(tmp_path: Path) -> None:
    assert read("echo", tmp_path) == source.Source("echo", "echo")


def test_a_bundled_name_wins_over_a_folder_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "echo").mkdir()
    found = read("echo", tmp_path)
    assert found.text == "echo"
    assert "./echo" in (found.note or "")


@pytest.mark.parametrize("text", ["./echo", "echo/", "sub/../echo"])
def test_a_path_is_a_folder(tmp_path: Path, text: str) -> None:
    assert read(text, tmp_path) == source.Source(str(tmp_path / "echo"), "echo")


def test_a_bare_name_that_is_not_bundled_is_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    found = read("mine", tmp_path)
    assert (found.text, found.name) == (str(tmp_path / "mine"), "mine")
    assert str(tmp_path / "mine") in (found.note or "")


def test_an_unknown_name_is_left_to_the_daemon_to_judge(tmp_path: Path) -> None:
    assert read("ehco", tmp_path) == source.Source("ehco", "ehco")


@pytest.mark.parametrize(
    ("text", "name"),
    [("my_mod:MyEnv", "myenv"), ("a.b:Outer.Inner", "inner"), ("docker://x/y/img:tag", "img")],
)
def test_other_sources_are_not_paths(tmp_path: Path, text: str, name: str) -> None:
    assert read(text, tmp_path) == source.Source(text, name)


@pytest.mark.parametrize(
    ("manifest", "name"),
    [
        ("name: My_Env  # a comment\n", "My_Env"),
        ("spec_version: 1\nname: 'two words'\n", "two-words"),
        ('name: "x"\n', "x"),
        ("app: x\n", "folder"),
        ("nested:\n  name: inner\n", "folder"),
        ("name:\n", "folder"),
        ("name: [\n", "env"),
        ("{{{ not yaml", "folder"),
    ],
)
def test_the_manifest_names_a_folder(tmp_path: Path, manifest: str, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "openenv.yaml").write_text(manifest)
    assert source.folder_name(folder) == name


@pytest.mark.parametrize("text", ["Ünï Cöde", "../escape", "...", "", "a" * 200, "-x-"])
def test_a_cleaned_name_is_valid(text: str) -> None:
    assert source.check_name(suggest_name(text))


@pytest.mark.parametrize("name", ["../escape", "Ä", "", ".x", "a b", "a" * 64, "a\n"])
def test_an_invalid_name_is_refused_with_one_that_is_allowed(name: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{suggest_name(name)!r} could be one"):
        source.check_name(name)


@pytest.mark.parametrize("name", ["sameName", "MyEnv-2", "_private"])
def test_names_of_upstreams_projects_and_of_docker_are_allowed(tmp_path: Path, name: str) -> None:
    assert source.check_name(name) == name
    (tmp_path / name).mkdir()
    assert read(f"./{name}", tmp_path).name == name


def test_variables_are_given_or_taken_from_here() -> None:
    given = ("A=1", "B=", "C", "D=x=y")
    found = source.read_variables(given, {"C": "here"})
    assert found == {"A": "1", "B": "", "C": "here", "D": "x=y"}


@pytest.mark.parametrize("text", ["MISSING", "=x", ""])
def test_a_variable_that_has_no_value_anywhere_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="KEY=VALUE"):
        source.read_variables((text,), {})


def test_variables_are_read_from_files_as_docker_reads_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first.env", tmp_path / "second.env"
    first.write_bytes(
        b'\xef\xbb\xbf# a comment\n\nA=1\r\n  B=two words # all of it\nC="quoted"\nHERE\nNOT_HERE\n'
        b"D=\nE=a=b\n"
    )
    second.write_text("A=2")
    found = source.read_env_files((str(first), str(second)), {"HERE": "here"})
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
        source.read_env_files((str(path),), {})


def test_a_file_of_variables_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="missing"):
        source.read_env_files((str(tmp_path / "missing"),), {})


def test_echo_is_bundled_when_it_has_a_manifest() -> None:
    root = Path(source.__file__).resolve().parent.parent
    expected = {p.parent.name for p in root.glob("envs/*/openenv.yaml")}
    assert source.bundled_names() == expected
