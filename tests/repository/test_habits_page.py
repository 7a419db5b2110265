# SPDX-License-Identifier: Apache-2.0
"""`docs/compatibility.md` says what is expected of the habits of environments' authors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def smoke_tests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything else: the root has a folder `server`, as upstream's projects have."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])


def test_the_tables_are_those_of_the_habits() -> None:
    from smoke_tests.same_as_upstream import page

    text = page.PAGE.read_text()
    found = page.with_tables(text)
    assert text == found, "write it again: python -m smoke_tests.same_as_upstream.page"


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
        for declared in (habit.ours, habit.shared or SAME, habit.isolated or SAME):
            reason = declared.removeprefix(BETTER)
            is_better = reason not in ("", declared)
            assert declared == SAME or is_better or declared.removeprefix(ON_PURPOSE) in named
