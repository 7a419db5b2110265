# SPDX-License-Identifier: Apache-2.0
"""Single pages say what is so: comparison, guarantees, habits, providers, commands; the prose."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from openenvd.cli import exit_codes
from openenvd.cli.main import COMMANDS
from openenvd.schema.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
COMPARISON = (ROOT / "docs" / "comparison.md").read_text()
PEERS = ["docker", "SkyPilot", "ollama", "pm2", "Ray", "Prefect", "OpenEnv", "here"]
GUARANTEES = [
    line
    for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    if line.startswith("| ") and not line.endswith("| shown by |")
]
NAMED = re.compile(r"`((?:smoke_)?tests/[\w/]+\.py)::(test_\w+)`")


def compared() -> list[list[str]]:
    """Return the rows of all tables, heads and rulers left out."""
    lines = re.findall(r"^\| [^|]+ \|.*\|$", COMPARISON, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_table_of_the_comparison_has_all_peers() -> None:
    heads = re.findall(r"^\| \|(.*)\|$", COMPARISON, re.MULTILINE)
    assert len(heads) == COMPARISON.count("\n## ")
    for head in heads:
        assert [cell.strip() for cell in head.split("|")] == PEERS


@pytest.mark.parametrize("row", compared(), ids=lambda row: str(row[0]))
def test_a_row_has_a_word_for_each_peer_and_a_command_or_a_page_for_ours(row: list[str]) -> None:
    assert len(row) == 1 + len(PEERS)
    for cell in row[1:]:
        assert re.match(r"(yes|no|partly)\b|[?\u2013]$", cell), cell
    assert re.search(r"^no|`openenv \w+|\]\([\w/.#-]+\)", row[-1]), row[-1]


def lint(*pages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "prose.py"), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pages_are_in_plain_words() -> None:
    done = lint()
    assert done.returncode == 0, done.stdout


def test_a_refused_word_is_found_but_not_in_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The server `mend` mends it. None waits.\n")
    assert lint(page).stdout.count("page.md: ") == 2


@cache
def _tests_of(file: str) -> frozenset[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize("row", GUARANTEES, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_guarantee_names_tests_that_there_are(row: str) -> None:
    named = NAMED.findall(row.rsplit("|", 2)[1])
    assert named
    for file, test in named:
        assert test in _tests_of(file), f"{file} has no {test}"


def test_each_habit_is_same_better_for_a_reason_or_an_entry_of_the_differences() -> None:
    from smoke_tests.same_as_upstream import page
    from smoke_tests.same_as_upstream.habits import all_habits
    from smoke_tests.same_as_upstream.habits.habit import BETTER, ON_PURPOSE, SAME

    habits = all_habits()
    assert len(habits) >= 100
    assert len({habit.name for habit in habits}) == len(habits)
    named = page.entries(page.PAGE.read_text())
    for habit in habits:
        assert habit.sentence.endswith("."), habit.name
        assert "|" not in habit.sentence, habit.name
        for declared in map(habit.declared, page.WAYS):
            reason = declared.removeprefix(BETTER)
            is_better = reason not in ("", declared)
            entry = declared.removeprefix(ON_PURPOSE)
            assert declared == SAME or is_better or entry in named


# Facts that were written since a provider was last tried: the page says so of them.
EVERYWHERE = {"test_a_client_that_thinks_is_told"}
EXITS = {
    "test_memory_beyond_the_limit",
    "test_memory_of_a_child",
    "test_kill_from_outside_after_one_for_memory",
    "test_crash_of_a_session",
    "test_removed_behind_the_daemons_back",
    "test_deaths_after_the_engine_is_restarted",
}
NOT_TRIED = {
    "docker": {"test_crash_of_a_session"},
    "swarm": EXITS,
    "kubernetes": EXITS | {"test_branches"},
}


def test_every_fact_holds_or_does_not_apply_on_every_provider() -> None:
    from smoke_tests.providers import page
    from smoke_tests.providers.under_test import PROVIDERS

    names = {fact.name for fact in page.facts()}
    assert len(names) > 40
    results = page.read_results()
    assert list(results) == list(PROVIDERS)
    for provider, result in results.items():
        tried = set(result.facts) | EVERYWHERE | NOT_TRIED.get(provider, set())
        assert tried == names, f"python -m smoke_tests.providers {provider} --write"
        assert all(map(page.is_settled, result.facts.values())), provider


def test_every_fact_is_a_sentence_with_a_name_and_entries_of_other_systems() -> None:
    from smoke_tests.providers import page

    facts = page.facts()
    assert len({fact.name for fact in facts}) == len(facts)
    for fact in facts:
        assert fact.sentence.endswith("."), fact
        assert "|" not in fact.sentence, fact
    from smoke_tests.providers import others, page

    assert set(others.read_others({fact.name for fact in page.facts()})) == {"openenv", "skypilot"}


@pytest.fixture(scope="module")
def commands() -> str:
    # In a process of its own: click remembers the help option of whoever asked first.
    command = [sys.executable, str(ROOT / "docs" / "commands_page.py")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_command_setting_and_exit_code_is_documented(commands: str) -> None:
    for name in COMMANDS:
        assert f"\n## openenv {name}\n\n```text\nUsage: openenv {name} " in commands
    for setting in SETTINGS:
        row = f"| `{setting.flag}` | `{setting.variable}` | {setting.default or ''} "
        assert row in commands or setting.default in (0, False)
        assert setting.help in commands
    codes = {v for k, v in vars(exit_codes).items() if k.isupper() and isinstance(v, int)}
    assert all(f"\n| {code} | " in commands for code in codes)
