# SPDX-License-Identifier: Apache-2.0
"""The site's page of habits, made from the habits' declarations."""

import itertools
from pathlib import Path

from .habits import MODULES, all_habits
from .habits.habit import BETTER, ON_PURPOSE, SAME, Habit

WAYS = ("shared", "isolated", "docker")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
INTRODUCTION = """\
# Habits of authors

`smoke_tests/same_as_upstream` serves small environments, each with one habit of those who write
them, on OpenEnv's server (uvicorn, `openenv` 0.10.0), by `openenv launch` with and without
`--isolate`, and on Docker. OpenEnv's client plays a session with the habit, one beside it and one
after it. The suite compares the answers, the lives of the sessions, and the processes and files
that are left. [Compatibility](compatibility.md) explains what differs on purpose.
"""
DIFFERENCES = "## Differences on purpose\n"


def render() -> str:
    """Return the page: a table for each module, and the reasons below."""
    reasons: dict[str, int] = {}
    parts = []
    for module, group in itertools.groupby(all_habits(), lambda habit: habit.module):
        lines = [f"| {MODULES[module]} | here |", "|---|---|"]
        for habit in group:
            cells = {way: cell(habit, way, reasons) for way in WAYS}
            if cells["docker"] == cells["shared"]:
                del cells["docker"]
            is_one = len({*cells.values()}) == 1
            ways = "; ".join(f"{way}: {word}" for way, word in cells.items())
            here = cells["shared"] if is_one else ways
            lines.append(f"| {habit.sentence.removesuffix('.')} | {here} |")
        parts.append("\n".join(lines) + "\n")
    notes = [f"{number}. {why}." for why, number in reasons.items()]
    return "\n".join([INTRODUCTION, *parts, *notes, ""])


def cell(habit: Habit, way: str, reasons: dict[str, int]) -> str:
    """Return one word, with the number of its reason or the name of its entry."""
    declared = habit.declared(way)
    if declared.startswith(BETTER):
        why = declared.removeprefix(BETTER)
        return f"better ({reasons.setdefault(why, len(reasons) + 1)})"
    return SAME if declared == SAME else declared.replace(ON_PURPOSE, "on purpose: ")


def entries(page: str) -> set[str]:
    table = page.partition(DIFFERENCES)[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip() for row in rows[1:]}
