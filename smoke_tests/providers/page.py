# SPDX-License-Identifier: Apache-2.0
"""The table of facts by provider in `docs/providers.md`, from the committed results.

    python -m smoke_tests.providers.page     write it again

The facts are the tests of this folder; the results (`results.json`) are what the last
`python -m smoke_tests.providers --write` saw. What stands before the heading is written by hand.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.json"
PAGE = FOLDER.parents[1] / "docs" / "providers.md"
HEADING = "## Facts\n"
HOLDS = "holds"
DOES_NOT_APPLY = "does not apply: "  # begins the reason why
DOES_NOT_HOLD = "does not hold: "
INTRODUCTION = """\
What the conformance suite found on each provider, with a real daemon, by the commands that a
user types. `python -m smoke_tests.providers` tries it on your machine; each fact is a test in
`smoke_tests/providers/`. A number stands for the reason below why a fact does not hold, or does not
apply.
"""

Results = dict[str, dict[str, str]]  # by provider and fact: `holds`, or why it does not apply


@dataclass(frozen=True, slots=True)
class Fact:
    """One test, which every provider is to pass."""

    name: str
    sentence: str
    group: str  # the first words of its module


def is_settled(outcome: str) -> bool:
    """Whether a fact holds, or is known not to, or not to apply."""
    return outcome == HOLDS or outcome.startswith((DOES_NOT_APPLY, DOES_NOT_HOLD))


def facts() -> list[Fact]:
    """All facts, in the order in which they are written."""
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
    """The committed results."""
    results: Results = json.loads(RESULTS.read_text())
    return results


def render(results: Results) -> str:
    """The page's generated part."""
    providers, notes = list(results), _notes(results)
    head = " | ".join(["", *(f"`{name}`" for name in providers), ""]).strip()
    parts = [HEADING, INTRODUCTION]
    groups = list(dict.fromkeys(fact.group for fact in facts()))
    for group in groups:
        rows = [
            f"| {fact.sentence} | "
            + " | ".join(_cell(results[name].get(fact.name), notes) for name in providers)
            + " |"
            for fact in facts()
            if fact.group == group
        ]
        parts.append(
            "\n".join([f"| {group} {head}", "|---" * (len(providers) + 1) + "|", *rows, ""])
        )
    parts += (
        ["\n".join(f"{number}. {why}" for why, number in notes.items()) + "\n"] if notes else []
    )
    return "\n".join(parts)


def _notes(results: Results) -> dict[str, int]:
    """Why facts do not apply, numbered as they come."""
    outcomes = [results[name].get(fact.name, HOLDS) for fact in facts() for name in results]
    return {
        why: number
        for number, why in enumerate(dict.fromkeys(o for o in outcomes if o != HOLDS), 1)
    }


def _cell(outcome: str | None, notes: dict[str, int]) -> str:
    if outcome is None:
        return "not tried"
    if outcome == HOLDS:
        return "yes"
    return f"{'no ' * outcome.startswith(DOES_NOT_HOLD)}({notes[outcome]})"


def with_table(page: str, results: Results) -> str:
    """The page with the part that begins at the heading replaced."""
    return page.partition(HEADING)[0] + render(results)


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text(), read_results()))


if __name__ == "__main__":
    main()
