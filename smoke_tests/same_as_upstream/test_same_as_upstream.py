# SPDX-License-Identifier: Apache-2.0
"""What authors of environments do works here as under upstream's own server, or better."""

from __future__ import annotations

import pytest

from ..conftest import new_machine, python_with
from ..docker_engine import DockerEngine
from .habits import all_habits
from .habits.habit import Habit
from .run import REQUIREMENTS, Seen, Trial, compare, is_as_declared

WAYS = ("shared", "isolated")


def marks(habit: Habit) -> list[pytest.MarkDecorator]:
    """An open fault; a project of its own, with three servers, which the long form alone starts."""
    open_fault = [pytest.mark.xfail(reason=habit.worse)] if habit.worse else []
    return [*open_fault, *([pytest.mark.long] if habit.alone else [])]


ROWS = [pytest.param(habit, id=habit.name, marks=marks(habit)) for habit in all_habits()]


def habits_of(request: pytest.FixtureRequest) -> list[Habit]:
    """Those whose tests run, of the tests that use this fixture."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [item for item in items if request.fixturename in item.fixturenames]
    habits = [item.callspec.params["habit"] for item in using]
    return [each for each in habits if isinstance(each, Habit)]


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Seen]]:
    """What was seen of all habits whose tests run."""
    folder = tmp_path_factory.mktemp("same")
    with new_machine(folder / "home") as machine:
        return Trial(machine, python_with(*REQUIREMENTS), WAYS).run(habits_of(request))


@pytest.fixture(scope="session")
def in_containers(
    request: pytest.FixtureRequest,
    docker_engine: DockerEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Seen]]:
    """The same, with Docker."""
    folder = tmp_path_factory.mktemp("same")
    with new_machine(folder / "home") as machine:
        machine.environ["DOCKER_HOST"] = docker_engine.host
        return Trial(machine, python_with(*REQUIREMENTS), ("docker",)).run(habits_of(request))


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


@pytest.mark.timeout(7200)
@pytest.mark.long
@pytest.mark.parametrize("habit", ROWS)
def test_a_habit_is_served_in_a_container(
    habit: Habit, in_containers: dict[str, dict[str, Seen]]
) -> None:
    seen = in_containers[habit.name]
    found = compare(seen["upstream"], seen["docker"])
    assert is_as_declared(habit, "docker", found), found
