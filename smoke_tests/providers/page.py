# SPDX-License-Identifier: Apache-2.0
"""The site's page of facts by provider (`docs/built_pages.py`).

The facts are the tests of this folder; `python -m smoke_tests.providers --write` writes their
results (`results.json`). The outcomes of other systems (`others.json`) are written by hand.
"""

import ast
import json
from dataclasses import dataclass, field
from pathlib import Path

from .others import System, read_others

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.json"
HEADING = "# Facts of the providers\n"
HOLDS = "holds"
DOES_NOT_APPLY = "does not apply: "  # prefix of the reason
DOES_NOT_HOLD = "does not hold: "
WORDS = "words"  # a property of a test: what a person reads of an exit, and where
WHERE = ("client", "status", "log")
INTRODUCTION = """\
The conformance suite tries each fact on each provider, with a real daemon and the commands that a
user types. `python -m smoke_tests.providers` runs it on your machine; each fact is a test in
`smoke_tests/providers/`. A number stands for the reason below why a fact does not hold or does not
apply.

The last columns are other systems: upstream's providers, and the best of SkyPilot's clusters,
managed jobs and services on Kubernetes and Slurm. They were read in source and documentation, not
run. For "the daemon" read the process that made upstream's provider object, and SkyPilot's API
server or controllers. O and S with a number lead to the sources at the end; \u2013 means that there
is nothing to compare, ? that nothing was found.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one provider in one run."""

    tried_on: str  # YYYY-MM-DD
    engine: str  # its name and version; empty if there is none, or it was not recorded
    facts: dict[str, str]  # `holds` or the reason, by fact
    words: dict[str, dict[str, str]] = field(default_factory=dict)  # of exits, by fact and where


Results = dict[str, Result]  # by provider


@dataclass(frozen=True, slots=True)
class Fact:
    """One test, which every provider is to pass."""

    name: str
    sentence: str
    group: str  # the first words of its module


def is_settled(outcome: str) -> bool:
    """Return whether a fact holds, is known not to hold, or does not apply."""
    return outcome == HOLDS or outcome.startswith((DOES_NOT_APPLY, DOES_NOT_HOLD))


def facts() -> list[Fact]:
    """List all facts in the order of the source."""
    found = []
    for path in sorted(FOLDER.glob("test_*.py")):
        module = ast.parse(path.read_text())
        group = (ast.get_docstring(module) or "").partition(":")[0].rstrip(".")
        found += [
            Fact(node.name, (ast.get_docstring(node) or "").partition("\n")[0], group)
            for node in module.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
    return found


def read_results() -> Results:
    return {name: Result(**entry) for name, entry in json.loads(RESULTS.read_text()).items()}


def read_systems() -> list[System]:
    return list(read_others({fact.name for fact in facts()}).values())


def render(results: Results, systems: list[System]) -> str:
    notes = _notes(results)
    columns = {f"`{name}`": _cells(result.facts, notes) for name, result in results.items()}
    columns |= {system.title: _cells_of_system(system) for system in systems}
    parts = [HEADING, INTRODUCTION, _runs(results)]
    for group in dict.fromkeys(fact.group for fact in facts()):
        rows = [
            [fact.sentence, *(cells[fact.name] for cells in columns.values())]
            for fact in facts()
            if fact.group == group
        ]
        parts.append(_table([group, *columns], rows))
    parts += [_words(results, fact) for fact in facts() if fact.group.startswith("Exits")]
    if notes:
        parts.append("\n".join(f"{number}. {why}" for why, number in notes.items()) + "\n")
    return "\n".join([*parts, *map(_section, systems)])


def _runs(results: Results) -> str:
    """Return the date and the engine of each provider's run."""
    runs = [
        f"`{name}` on {it.tried_on}" + f" ({it.engine})" * bool(it.engine)
        for name, it in results.items()
    ]
    return f"Last run: {', '.join(runs)}.\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def _words(results: Results, fact: Fact) -> str:
    """Return the words that a person reads of an exit; nothing if no provider has recorded any."""
    lines = [
        f"- `{name}`, {where}: {words[where]}"
        for name, result in results.items()
        for words in [result.words.get(fact.name, {})]
        for where in WHERE
        if words.get(where)
    ]
    return "\n".join([fact.sentence, "", *lines, ""]) * bool(lines)


def _notes(results: Results) -> dict[str, int]:
    """Return the reasons why facts do not apply, numbered in order."""
    outcomes = [results[name].facts.get(fact.name, HOLDS) for fact in facts() for name in results]
    return {
        why: number
        for number, why in enumerate(dict.fromkeys(o for o in outcomes if o != HOLDS), 1)
    }


def _cells(outcomes: dict[str, str], notes: dict[str, int]) -> dict[str, str]:
    return {fact.name: _cell(outcomes.get(fact.name), notes) for fact in facts()}


def _cell(outcome: str | None, notes: dict[str, int]) -> str:
    if outcome is None:
        return "not tried"
    if outcome == HOLDS:
        return "yes"
    return f"{'no ' * outcome.startswith(DOES_NOT_HOLD)}({notes[outcome]})"


def _cells_of_system(system: System) -> dict[str, str]:
    numbers = _numbers(system)
    cells = {}
    for fact in facts():
        outcome, note = system.outcome(fact.name)
        cells[fact.name] = f"{outcome} ({numbers[note]})"
    return cells


def _numbers(system: System) -> dict[str, str]:
    """Return the number of each note of a system, in order: `S1`."""
    names = dict.fromkeys(system.outcome(fact.name)[1] for fact in facts())
    return {name: f"{system.title[0]}{number}" for number, name in enumerate(names, 1)}


def _section(system: System) -> str:
    lines = []
    for name, number in _numbers(system).items():
        note = system.notes[name]
        links = ", ".join(f"[{_short(it)}]({system.address(it)})" for it in note.sources)
        lines.append(f"- {number}: {note.why}" + f" ({links})" * bool(links))
    head = f"## {system.title}\n\nVersion {system.version}, looked up on {system.read_on}.\n"
    return "\n".join([head, *lines, ""])


def _short(source: str) -> str:
    return f"`{source}`" if "://" not in source else source.split("/")[2]
