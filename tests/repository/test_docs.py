# SPDX-License-Identifier: Apache-2.0
"""What the pages say is so: commands parse, links lead somewhere, tables are complete."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from openenvd.cli import exit_codes, passthrough
from openenvd.cli.main import cli
from openenvd.operations import registry
from openenvd.requests_db.states import EnvironmentState, ErrorKind, ReplicaState, RequestState
from openenvd.server.errors import ApiError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
ONE_REQUEST = (ROOT / "docs" / "one-request.md").read_text()
# What stands for something of the reader's.
METAVARIABLES = re.compile(r"\[.*?\]|…|\\\|\w+")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shown_commands() -> list[str]:
    """Every `openenv …` of the pages: lines of shell blocks, and code within sentences."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
        lines += re.findall(r"`(openenv [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in lines:
            parts = re.split(r"&&|;", line.partition("#")[0])
            found |= {part.strip() for part in parts if part.strip().startswith("openenv ")}
    return sorted(found)


@pytest.mark.parametrize("command", shown_commands())
def test_every_command_that_is_shown_is_one(command: str) -> None:
    _, *arguments = shlex.split(METAVARIABLES.sub("", command))
    if arguments and arguments[0] in passthrough.COMMANDS:
        return  # upstream's, where that is installed
    context = click.Context(cli, info_name="openenv")
    name, found, rest = cli.resolve_command(context, arguments)
    assert found is not None
    required = [p for p in found.params if isinstance(p, click.Argument) and p.required]
    if rest or not required:  # a bare `openenv launch` is the name of the command
        found.make_context(str(name), [*rest], parent=context)


def test_commands_are_found_to_be_shown() -> None:
    assert len(shown_commands()) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_exit_codes_of_the_readme_are_those_there_are() -> None:
    section = README.partition("| exit code |")[2].partition("\n\n")[0]
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert shown == {v for k, v in vars(exit_codes).items() if k.isupper() and isinstance(v, int)}


def test_every_refusal_of_the_api_is_documented() -> None:
    section = API.partition("## Errors")[2]
    shown = {
        (int(status), kind)
        for status, kinds in re.findall(r"^\| (\d+) \| (.*?) \|", section, re.MULTILINE)
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    known = {(kind.status, kind.kind) for kind in ApiError.__subclasses__()}
    assert known <= shown
    assert {kind for _, kind in shown} <= {kind for _, kind in known} | {"internal", "http"}


@pytest.mark.parametrize("states", [RequestState, EnvironmentState, ReplicaState, ErrorKind])
def test_every_state_and_kind_is_documented(states: type[RequestState]) -> None:
    words = set(re.findall(r"\w+", API))
    assert {state.value for state in states} <= words


def test_every_operation_is_documented_as_it_is_declared() -> None:
    for operation in registry.OPERATIONS:
        row = f"| `{operation.name}` | `{operation.schedule}` | {operation.summary} |"
        assert row in API


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=!;\s]", item)[0] for item in project["dependencies"]}
    table = CONTRIBUTING.partition("## Dependencies")[2].partition("\n## ")[0]
    given = {
        name.strip()
        for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for name in cell.split(",")
    }
    assert names <= given
    assert given - names <= {"package", "---"}


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / ".types" / "openenvd").iterdir() if path.is_dir()}
    shown = set(re.findall(r"`(\w+)/`", CONTRIBUTING))
    assert rooms <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_that_is_shown_compiles(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        # As in a notebook, where examples of an asynchronous client are tried.
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_path_of_one_request_exists() -> None:
    paths = set(re.findall(r"`((?:[a-z_]+/)+(?:\w+\.py)?)`", ONE_REQUEST))
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_function_of_one_request_is_in_a_file_of_its_entry() -> None:
    entries = re.findall(r"^- .*(?:\n  .*)*", ONE_REQUEST, re.MULTILINE)
    for entry in entries:
        files = re.findall(r"`([\w/]+\.py)`", entry)
        text = "\n".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([\w.]+)\(\)`", entry):
            for part in name.split("."):
                assert re.search(rf"^\s*(async def|def|class) {part}\b", text, re.MULTILINE), entry


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "index.md").read_text()))
    assert listed == {page.name for page in folder.glob("[0-9]*.md")}
