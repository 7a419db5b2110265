# SPDX-License-Identifier: Apache-2.0
"""Habits of environments' authors work here as on upstream's own server, or better."""

import pytest

from ..conftest import new_machine, python_with
from ..engines.docker_engine import DockerEngine
from .habits import all_habits
from .habits.habit import Habit
from .run import REQUIREMENTS, Seen, Trial, compare, is_as_declared

WAYS = ("shared", "isolated")
Outcomes = dict[str, dict[str, Seen]]

# A habit that is alone has a project and three servers of its own: only the long form runs it.
ROWS = [
    pytest.param(habit, id=habit.name, marks=[pytest.mark.long] if habit.alone else [])
    for habit in all_habits()
]


def tried(
    request: pytest.FixtureRequest, temporary: pytest.TempPathFactory, *ways: str, **environ: str
) -> Outcomes:
    """The behaviour of the habits whose tests run, among the tests that use this fixture."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [item for item in items if request.fixturename in item.fixturenames]
    habits = [item.callspec.params["habit"] for item in using]
    with new_machine(temporary.mktemp("same") / "home") as machine:
        machine.environ |= environ
        trial = Trial(machine, python_with(*REQUIREMENTS), ways)
        return trial.run([each for each in habits if isinstance(each, Habit)])


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return tried(request, tmp_path_factory, *WAYS)


@pytest.fixture(scope="session")
def in_containers(
    request: pytest.FixtureRequest,
    docker_engine: DockerEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcomes:
    return tried(request, tmp_path_factory, "docker", DOCKER_HOST=docker_engine.host)


@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("same_as_upstream")
@pytest.mark.one_in(10)
@pytest.mark.parametrize("habit", ROWS)
def test_a_habit_is_served_as_upstream_serves_it(habit: Habit, outcomes: Outcomes) -> None:
    seen = outcomes[habit.name]
    for way in WAYS:
        found = compare(seen["upstream"], seen[way])
        assert is_as_declared(habit, way, found), f"{way}: {found}"


@pytest.mark.timeout(7200)
@pytest.mark.long
@pytest.mark.parametrize("habit", ROWS)
def test_a_habit_is_served_in_a_container(habit: Habit, in_containers: Outcomes) -> None:
    seen = in_containers[habit.name]
    found = compare(seen["upstream"], seen["docker"])
    assert is_as_declared(habit, "docker", found), found
