# SPDX-License-Identifier: Apache-2.0
"""The help pages of `launch` and `rollout`, and `--set`, which has what they do not show."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from openenvd.cli import exit_codes, help_pages
from openenvd.cli.commands import launch, rollout
from openenvd.cli.help_pages import SCREEN_LINES, GroupedCommand, SetOption
from openenvd.cli.main import COMMANDS, OTHER_WORDS, cli, example_lines
from openenvd.cli.passthrough import COMMANDS as UPSTREAMS
from openenvd.client.errors import ApiRefused
from openenvd.schema.operation_options import DrainOptions, RequestOptions, RolloutOptions
from openenvd.schema.spec import LaunchOptions
from openenvd.system.text.options import options_of

from ..client.fake_daemon import new_request
from .conftest import PROGRAM, Cli, Command

PAGES = (
    (launch.launch, (LaunchOptions, DrainOptions, RequestOptions)),
    (rollout.rollout, (RolloutOptions, RequestOptions)),
)


def set_option_of(command: click.Command) -> SetOption:
    found = help_pages.set_option_of(command)
    assert found is not None
    return found


@pytest.fixture
def payload(cli: Cli) -> Any:
    """Launch with these words; what was sent."""

    def sent(*words: str) -> dict[str, Any]:
        cli.accepts(new_request(state="PENDING"))
        assert cli("launch", "--async", "echo", *words).code == exit_codes.OK
        return cli.sent()[-1]

    return sent


@pytest.mark.parametrize("found", [launch.launch, rollout.rollout], ids=["launch", "rollout"])
def test_the_short_help_page_fits_one_screen_and_the_other_has_all(found: GroupedCommand) -> None:
    def page(flag: str) -> list[str]:
        words = [*PROGRAM, str(found.name), flag]
        ran = subprocess.run(words, capture_output=True, text=True, check=True)
        return ran.stdout.splitlines()

    short, full = page("-h"), page("--help")
    assert len(short) <= SCREEN_LINES
    assert {line for line in short if not line.startswith("Example")} < set(full)
    flags = " ".join(found.groups.values()).replace("|", "").split()
    assert all(any(flag in line for line in full) for flag in flags)


@pytest.mark.parametrize(("found", "declarations"), PAGES)
def test_every_option_is_a_flag_in_a_group_or_is_set(
    found: GroupedCommand, declarations: tuple[type, ...]
) -> None:
    flags = [each for each in found.params if isinstance(each, click.Option)]
    grouped = " ".join(found.groups.values()).replace("|", "").split()
    assert sorted(grouped) == sorted([*(each.opts[-1] for each in flags), "--help"])
    declared = {i.name for each in declarations for i in options_of(each) if i.own_flag != ""}
    rare = {item.name for item in set_option_of(found).table.values()}
    assert declared == rare | (declared & {each.name for each in flags})
    assert not rare & {each.name for each in flags}


def test_values_are_read_as_those_of_flags_are_also_what_a_request_has(payload: Any) -> None:
    words = ("admission-timeout=2m", "reset-first=no", "max_message=1G", "serve-as-is=yes")
    body = payload(*(word for each in words for word in ("--set", each)))
    assert body["payload"].items() >= {
        ("admission_timeout_seconds", 120.0),
        ("reset_first", False),
        ("max_message_mb", 1024),
        ("serve_as_is", True),
    }
    body = payload("--set", "idempotency-key=one", "--set", "priority=5", "--set", "timeout=1h")
    assert (body["idempotency_key"], body["priority"], body["timeout_seconds"]) == ("one", 5, 3600)


def test_a_bound_of_a_size_has_its_unit() -> None:
    message = "body: buffer_mb: Input should be greater than or equal to 4"
    refused = ApiRefused(422, {"kind": "invalid", "message": message})
    told = help_pages.in_words(refused, rollout.rollout).message
    assert told == "--set buffer: Input should be greater than or equal to 4 MB"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redy-timeout=5", "did you mean ready-timeout or"),
        ("zzz=1", "--set help lists them"),
        ("ready-timeout", "write ready-timeout=DURATION"),
        ("reset_first=", "write reset-first=yes|no"),
        ("idempotency-key= ", "write idempotency-key=KEY"),
        ("port=80", "port has an option of its own; write --port"),
        ("min=0", "min has an option of its own; write --min"),
        ("ready-timeout=soon", "ready-timeout=DURATION: 'soon' is not a duration"),
        ("ready-timeout=0", "ready-timeout=DURATION: 0.0 is not in the range x>0"),
        ("max-message=big", "max-message=SIZE: 'big' is not a size"),
        ("reset-first=maybe", "reset-first=yes|no: 'maybe' is neither"),
        ("priority=1.5", "priority=N: '1.5' is not a whole number"),
    ],
)
def test_a_wrong_one_says_what_is_right(cli: Cli, text: str, expected: str) -> None:
    answer = cli("launch", "echo", "--set", text)
    assert answer.code == exit_codes.USAGE
    assert expected in " ".join(answer.err.split())
    assert cli.fake.calls == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("launch", "echo", "--reset-first"), "--set reset-first=yes|no"),
        (("launch", "echo", "--no-reset-first"), "--set reset-first=no"),
        (("launch", "echo", "--scale-down=5"), "--set scale-down=DURATION"),
        (("check", "--ready-timeout", "5"), "--set ready-timeout=DURATION"),
        (("rollout", "echo", "--out", "x", "--policy-timeout", "5"), "--set policy-timeout="),
    ],
)
def test_an_option_that_is_no_flag_says_how_it_is_set(
    cli: Cli, words: tuple[str, ...], expected: str
) -> None:
    answer = cli(*words)
    assert answer.code == exit_codes.USAGE
    assert f"Write {expected}" in answer.err
    assert "Did you mean" not in answer.err


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ("max_message_mb: is too large", "--set max-message: is too large"),
        ("body: serve_as_is has no shards", "--set serve-as-is has no shards"),
        ("body: base: is none of a base", "--set base: is none of a base"),
        ("engine_options: 'x' is none", "--engine-option: 'x' is none"),
        ("body: port: is the gateway's port", "--port: is the gateway's port"),
    ],
)
def test_a_refusal_names_the_words_of_the_command_line(
    cli: Cli, refused: str, expected: str
) -> None:
    cli.post("/v1/requests", (422, {"error": {"kind": "invalid", "message": refused}}))
    assert cli("launch", "echo").err == f"error: {expected}\n"


def test_set_help_lists_all_names(cli: Cli) -> None:
    out = cli("launch", "--set", "help").out
    for word in set_option_of(launch.launch).table:
        assert f"{word}=" in out
    answer = cli("launch", "--set", "help", "--json")
    assert [each["name"] for each in answer.json] == list(set_option_of(launch.launch).table)
    assert "reset-first=yes|no" in answer.err


# Examples: every command has some, and each of them is a command line


Found = tuple[str, click.Command]
TOP = click.Context(cli, info_name="openenv", help_option_names=["-h", "--help"])


def commands(command: click.Command | None = cli, path: str = "openenv") -> Iterator[Found]:
    assert command is not None
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(TOP):
            yield from commands(command.get_command(TOP, name), f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), list(commands()), ids=lambda each: str(each)[:40])
def test_every_help_page_has_examples_within_80_columns(path: str, command: click.Command) -> None:
    names = ["-h", "--help"]
    context = click.Context(command, info_name=path, help_option_names=names, terminal_width=80)
    text = command.get_help(context)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "--json" in text or isinstance(command, click.Group) or path == "openenv completion"
    assert example_lines(command)
    for line in example_lines(command):
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


def test_the_example_is_the_hint_in_json_of_no_other_error(command: Command) -> None:
    answer = command("launch", "--json")
    assert (answer.code, answer.json["error"]["kind"]) == (exit_codes.USAGE, "usage")
    assert answer.json["error"]["hint"] == "for example: openenv launch echo"
    answer = command("launch", "echo", "--nothing", "--json")
    assert "For example" not in answer.err
    assert answer.json["error"]["hint"] == "see --help"


def test_words_of_other_tools_are_none_of_ours() -> None:
    assert not OTHER_WORDS.keys() & {*COMMANDS, *UPSTREAMS}
    meant = {words.split()[0] for words in OTHER_WORDS.values()}
    assert meant - {"--help", "--version"} <= set(COMMANDS)


def test_only_near_options_are_suggested(cli: Cli) -> None:
    assert "Did you mean" not in cli("launch", "--on", "slurm", "echo").err
    assert "'--memory'" in cli("launch", "--memry", "1G", "echo").err


@pytest.mark.usefixtures("fake")
def test_usage_examples_and_hints_name_the_command_as_it_was_called(tmp_path: Path) -> None:
    called = tmp_path / "openenvd"
    called.write_text(f"#!{sys.executable} -P\nfrom openenvd.cli.entry import main; main()\n")
    called.chmod(0o755)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([called, *words], capture_output=True, text=True, check=False)

    shown = run("launch", "--help").stdout
    assert shown.startswith("Usage: openenvd launch ")
    assert "openenvd launch echo" in shown
    assert "openenv " not in shown
    assert "For example: openenvd launch echo" in run("launch").stderr
    assert "  openenvd stop" in run("up", "--foreground").stderr
