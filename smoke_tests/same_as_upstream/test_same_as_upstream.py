# SPDX-License-Identifier: Apache-2.0
"""What authors of environments do works here as under upstream's own server, or better."""

from __future__ import annotations

import pytest

from ..conftest import new_machine, python_with
from .habits import all_habits
from .habits.habit import Habit
from .run import REQUIREMENTS, Seen, Trial, compare, is_as_declared

WAYS = ("shared", "isolated")
ROWS = [
    pytest.param(
        habit,
        id=habit.name,
        marks=[pytest.mark.xfail(reason=habit.worse)] if habit.worse else [],
    )
    for habit in all_habits()
]


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Seen]]:
    """What was seen of all habits whose tests run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    habits = [call.params["habit"] for call in calls if call and "habit" in call.params]
    folder = tmp_path_factory.mktemp("same")
    with new_machine(folder / "home") as machine:
        return Trial(machine, python_with(*REQUIREMENTS), WAYS).run(habits)


@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("same_as_upstream")
@pytest.mark.one_in(10)
@pytest.mark.parametrize("habit", ROWS)
def test_a_habit_is_served_as_upstream_serves_it(
    habit: Habit, outcomes: dict[str, dict[str, Seen]]
) -> None:
    seen = outcomes[habit.name]
    for way in WAYS:
        found = compare(seen["upstream"], seen[way])
        assert is_as_declared(habit, way, found), f"{way}: {found}"
