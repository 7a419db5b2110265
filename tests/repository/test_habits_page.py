# SPDX-License-Identifier: Apache-2.0
"""`docs/compatibility.md` says what is expected of the habits of environments' authors."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imported behind everything else: the root has a folder `server`, as upstream's projects."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    return importlib.import_module("smoke_tests.same_as_upstream.page")


def test_each_habit_is_same_better_for_a_reason_or_an_entry_of_the_differences(page: Any) -> None:
    habits = page.all_habits()
    assert len(habits) >= 100
    assert len({habit.name for habit in habits}) == len(habits)
    named = page.entries(page.PAGE.read_text())
    for habit in habits:
        assert habit.sentence.endswith("."), habit.name
        assert "|" not in habit.sentence, habit.name
        for declared in map(habit.declared, page.WAYS):
            reason = declared.removeprefix(page.BETTER)
            is_better = reason not in ("", declared)
            entry = declared.removeprefix(page.ON_PURPOSE)
            assert declared == page.SAME or is_better or entry in named
