# SPDX-License-Identifier: Apache-2.0
"""Examples: every command has some, and each of them is a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

from openenvd.cli import exit_codes
from openenvd.cli.help_pages import GroupedCommand
from openenvd.cli.main import COMMANDS, OTHER_WORDS, cli, example_lines
from openenvd.cli.passthrough import COMMANDS as UPSTREAMS

from .conftest import Command

Found = tuple[str, click.Command]
TOP = click.Context(cli, info_name="openenv", help_option_names=["-h", "--help"])


def commands(command: click.Command | None = cli, path: str = "openenv") -> Iterator[Found]:
    assert command is not None
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(TOP):
            yield from commands(command.get_command(TOP, name), f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), list(commands()), ids=lambda each: str(each)[:40])
def test_every_help_page_has_examples(path: str, command: click.Command) -> None:
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    text = command.get_help(context)
    assert "--json" in text or isinstance(command, click.Group) or path == "openenv completion"
    fits = 1 if isinstance(command, GroupedCommand) else None  # its page keeps to one screen
    assert example_lines(command)
    for line in example_lines(command)[:fits]:
        assert line in text


@pytest.mark.parametrize("line", [line for _, each in commands() for line in example_lines(each)])
def test_every_example_is_a_command_line(line: str) -> None:
    _, *words = shlex.split(line)
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(TOP, words.pop(0))
        assert found is not None, line
        command = found
    command.make_context("it", words, parent=TOP)  # raises where it is none


LACKING = [each for each in commands() if any(given.required for given in each[1].params)]


@pytest.mark.parametrize(("path", "lacking"), LACKING)
def test_a_command_without_its_argument_shows_an_example(
    path: str, lacking: click.Command, command: Command
) -> None:
    answer = command(*path.split()[1:])
    assert answer.code == exit_codes.USAGE
    line, *_ = example_lines(lacking)
    assert answer.err.endswith(f"For example: {line}\n")


def test_the_example_is_the_hint_in_json(command: Command) -> None:
    hint = command("launch", "--json").json["error"]["hint"]
    assert hint == "for example: openenv launch echo"


def test_what_is_wrong_otherwise_has_no_example(command: Command) -> None:
    answer = command("launch", "echo", "--nothing", "--json")
    assert "For example" not in answer.err
    assert answer.json["error"]["hint"] == "see --help"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("stop", "echo"), "down echo"),
        (("requests", "--limit", "3", "abc"), "status abc"),
        (("up", "two words"), "launch 'two words'"),
    ],
)
def test_an_argument_of_a_command_that_takes_none_leads_to_the_one_that_does(
    words: tuple[str, ...], meant: str, command: Command
) -> None:
    assert command(*words).err.endswith(f"Did you mean: openenv {meant}\n")
    answer = command(*words, "--json")
    assert answer.code == exit_codes.USAGE
    assert answer.json["error"]["hint"] == f"did you mean: openenv {meant}"


def test_words_of_other_tools_are_none_of_ours() -> None:
    assert not OTHER_WORDS.keys() & {*COMMANDS, *UPSTREAMS}
    meant = {words.split()[0] for words in OTHER_WORDS.values()}
    assert meant - {"--help", "--version"} <= set(COMMANDS)
