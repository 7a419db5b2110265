# SPDX-License-Identifier: Apache-2.0
"""`openenv config`, and the variables and names that a command line gives."""

import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
import pytest

from openenvd.cli import exit_codes
from openenvd.cli.options import read_env_files, read_variables
from openenvd.environments.sources.resolve import check_source
from openenvd.schema.errors import UnknownSource
from openenvd.schema.settings import Settings
from openenvd.schema.spec import suggest_name

from ..client.fake_daemon import FakeDaemon
from .conftest import Command


def test_without_a_daemon_it_is_what_the_next_one_has_unless_the_file_is_wrong(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path))
    monkeypatch.setenv("OPENENV_KEEP_DAYS", "2.5")
    (tmp_path / "config.toml").write_text("max_log_mb = 7")
    answer = command("config", "--json")
    assert answer.code == 0, answer.err
    settings = answer.json["settings"]
    assert set(settings) == set(asdict(Settings()))
    assert settings["max_log_mb"] == {"value": 7, "from": "config.toml"}
    assert settings["keep_days"] == {"value": 2.5, "from": "OPENENV_KEEP_DAYS"}
    assert settings["max_pending"] == {"value": 100_000, "from": "default"}
    assert answer.json["pid"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    (tmp_path / "config.toml").write_text("prot = 1")
    answer = command("config")
    assert answer.code == 2
    assert "did you mean port?" in answer.err


def test_of_a_daemon_it_is_what_is_in_force(command: Command, fake: FakeDaemon) -> None:
    fake.write_identity(settings_from={"port": "--port"}, flags={"port": 9000})
    fake.get("/v1/info", {"settings": asdict(Settings(port=9000))})
    fake.paths.config_file.write_text("max_log_mb = 7")
    answer = command("config")
    assert answer.code == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert ["port", "9000", "--port"] in rows
    assert ["max_log_mb", "64", "default"] in rows


# Variables and names that a command line gives.


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
    with pytest.raises(click.BadParameter, match="missing"):
        read_env_files((str(tmp_path / "missing"),), {})


@pytest.mark.parametrize("line", ["=x", "A B=1", "export A=1"])
def test_a_line_that_is_no_variable_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "some.env"
    path.write_text(f"A=1\n{line}\n")
    with pytest.raises(click.BadParameter, match=r"some\.env:2: "):
        read_env_files((str(path),), {})


@pytest.mark.parametrize("name", ["../escape", "Ä", "", ".x", "a b", "a" * 64, "a\n"])
def test_an_invalid_name_is_refused_with_one_that_is_allowed(command: Command, name: str) -> None:
    answer = command("launch", "echo", "--name", name)
    assert answer.code == 2
    assert f"--name {suggest_name(name)}" in answer.err


@pytest.mark.parametrize("source", ["ech", "/nope", "nomodule:Class"])
@pytest.mark.parametrize("command", ["launch", "image build", "test"])
def test_a_source_that_names_nothing_is_refused_before_a_daemon_is_started(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path, command: str, source: str
) -> None:
    refused = process(*command.split(), source, OPENENV_HOME=str(tmp_path))
    with pytest.raises(UnknownSource) as caught:
        check_source({"source": source})
    _, told = refused.communicate()
    assert told == f"error: {caught.value.message}\n  {caught.value.hint}\n"
    assert refused.returncode == exit_codes.USAGE
    assert not (tmp_path / "daemon.log").exists()
