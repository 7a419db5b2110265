# SPDX-License-Identifier: Apache-2.0
"""What the pages say is so: commands parse, links lead somewhere, tables are complete.

Blocks of commands and of Python run in `smoke_tests/`; what of them can be known without that is
here.
"""

import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest

from openenvd.cli import passthrough
from openenvd.cli.main import COMMANDS, cli
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState, RequestState

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
API = (ROOT / "docs" / "api.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
ONE_REQUEST = (ROOT / "docs" / "one-request.md").read_text()
LOAD_TESTS = "".join(path.read_text() for path in (ROOT / "load_tests").rglob("*.py"))
# What stands for something of the reader's.
METAVARIABLES = re.compile(r"\[.*?\]|…|\\\|\w+")


# Pages that the site is built with.
BUILT = ("commands.md", "facts.md", "figures.md", "habits.md", "http-routes.md")

# What is in a fence, and is nothing that anybody types into a shell or Python.
NO_PROGRAM = {"json", "text", "toml", "traceql", "yaml"}
# How a line begins that somebody is to type.
TYPED = r"(?:\$ |openenvd? [a-z]|pip |python3? |uv |docker |kubectl |git |bash |export )"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shown_commands() -> list[str]:
    """Every `openenv …` of the pages: in blocks, in workflows, and in code within sentences."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
        lines += re.findall(r"^(?:- run: |\$ )(openenv .+)", text, re.MULTILINE)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_every_extra_is_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target and not target.endswith(BUILT):
            assert (page.parent / target).exists(), target
    # Tests of pages install nothing: they have all of them.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    shown = re.findall(r"'(?:openenvd|\.)\[([\w,]+)\]'", page.read_text())
    assert {name for names in shown for name in names.split(",")} <= set(extras)


@pytest.mark.parametrize("states", [RequestState, EnvironmentState, ReplicaState, ErrorKind])
def test_every_state_and_kind_is_documented(states: type[RequestState]) -> None:
    words = set(re.findall(r"\w+", API))
    assert {state.value for state in states} <= words


def test_every_dependency_has_a_reason() -> None:
    lines = (
        (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2].split("\n]")[0]
    )
    assert [line for line in lines.split("\n") if " # " not in line] == []


def test_every_room_is_on_the_map_and_every_decision_listed() -> None:
    rooms = {path.name for path in (ROOT / ".types" / "openenvd").iterdir() if path.is_dir()}
    shown = set(re.findall(r"`(\w+)/`", CONTRIBUTING))
    assert rooms <= shown
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "index.md").read_text()))
    assert listed == {page.name for page in folder.glob("[0-9]*.md")}


@pytest.fixture
def run() -> ModuleType:
    from smoke_tests import pages

    return pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_is_seen_and_runs_or_says_why(page: Path, run: ModuleType) -> None:
    for block in run.blocks(page):
        if block.language not in NO_PROGRAM:
            assert block.language in run.RUN or block.not_run, block
            assert not block.needs or block.needs in run.SUITES, block
    assert page in run.all_pages()
    text, found = page.read_text(), list(run.blocks(page))
    assert len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) == 2 * len(found)
    marks = sum(bool(each.not_run) + bool(each.needs) + len(each.before) for each in found)
    assert len(re.findall(r"<!-- (?:not run|run with|before)", text)) == marks
    assert all(bool(each.not_run) + bool(each.needs) < 2 for each in found)
    texts = [each.code for each in run.blocks(page) if each.language in NO_PROGRAM]
    for text in texts:
        assert not re.search(rf"^{TYPED}", text, re.MULTILINE), text
    without_blocks = re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert not re.search(rf"^(?: {{4,}}|\t){TYPED}", without_blocks, re.MULTILINE)


def test_a_suite_runs_what_pages_need(run: ModuleType) -> None:
    for what, suite in run.SUITES.items():
        assert run.pages_that_need(what), what
        assert f'pages_that_need("{what}")' in (ROOT / "smoke_tests" / suite).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_load_test_that_is_shown_is_one(page: Path) -> None:
    """With its options; `load_tests/run_short.py` runs their short forms."""
    for shown in re.findall(r"python -m load_tests\.([\w.]+(?:.|\\\n)*)", page.read_text()):
        name, *words = re.split("[`;'#)]", shown)[0].split()
        program = ROOT / "load_tests" / f"{name.replace('.', '/')}.py"
        assert name == "NAME" or program.exists(), name
        for option in (word for word in words if word.startswith("--")):
            as_keyword = f"{option[2:].replace('-', '_')}="
            assert f'"{option}"' in LOAD_TESTS or as_keyword in LOAD_TESTS, option


def hinted_commands() -> list[str]:
    """The `openenv …` in the product's own texts, up to where a sentence goes on."""
    found = set()
    for room in (ROOT / ".types" / "openenvd").iterdir():
        for path in (ROOT / room.name).rglob("*.py"):
            text = re.sub(r'"\n\s*f?"', "", path.read_text())  # a text that is written in pieces
            text = re.sub(r"\{[^{}\n]*\}", "X", text)
            found |= set(re.findall(r"openenv(?: (?:[a-z]+|--?[a-z][a-z-]*|[A-Z|_]+))+", text))
    return sorted(found)


@pytest.mark.parametrize("line", hinted_commands())
def test_every_command_of_a_hint_is_one(line: str) -> None:
    """With its options; where it ends and the sentence goes on, only a reader knows."""
    _, name, *words = line.split()
    if name in passthrough.COMMANDS or name not in COMMANDS:
        assert not any(word.startswith("-") for word in words), line
        return
    command = cli.get_command(click.Context(cli), name)
    while isinstance(command, click.Group):
        command = command.commands.get(words.pop(0)) if words else None
    options = (
        {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        if command
        else set()
    )
    options.add("--help")
    assert {word for word in words if word.startswith("-")} <= options


def test_every_path_and_function_of_one_request_is_where_it_says() -> None:
    paths = set(re.findall(r"`((?:[a-z_]+/)+(?:\w+\.py)?)`", ONE_REQUEST))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    entries = re.findall(r"^- .*(?:\n  .*)*", ONE_REQUEST, re.MULTILINE)
    for entry in entries:
        files = re.findall(r"`([\w/]+\.py)`", entry)
        text = "\n".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([\w.]+)\(\)`", entry):
            for part in name.split("."):
                assert re.search(rf"^\s*(async def|def|class) {part}\b", text, re.MULTILINE), entry
