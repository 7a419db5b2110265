# SPDX-License-Identifier: Apache-2.0
"""What is learned of a class, and what is decided by it: plain values, no processes."""

from __future__ import annotations

import functools
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from openenvd.env_host.bundled.echo.environment import EchoAction, EchoEnvironment, EchoObservation
from openenvd.env_host.environment import upstream_project
from openenvd.env_host.environment.definition import AnyAction, Definition, definition_of_class
from openenvd.env_host.environment.instances import Calls, keep_accepted
from openenvd.env_host.environment.interfaces import Action, Observation, State
from openenvd.env_host.environment.plan import supports_concurrency, try_factory
from openenvd.system.process.proc import children_of


class Derived(EchoEnvironment):
    pass


class Annotated:
    @property
    def state(self) -> State:
        return State()

    def reset(self) -> EchoObservation:
        return EchoObservation()

    def step(self, action: EchoAction) -> EchoObservation:
        return EchoObservation()


class Said(Annotated):
    action_cls = Action


class Untyped:
    def reset(self) -> Any:
        return None

    def step(self, action: Any) -> Any:
        return None


class AsyncStep(EchoEnvironment):
    async def step_async(
        self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any
    ) -> EchoObservation:
        return EchoObservation()


class AsyncByName(Untyped):
    async def reset(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("env_class", "types"),
    [
        (EchoEnvironment, (EchoAction, EchoObservation, State)),
        (Derived, (EchoAction, EchoObservation, State)),
        (Annotated, (EchoAction, EchoObservation, State)),
        (Said, (Action, EchoObservation, State)),
        (Untyped, (AnyAction, Observation, State)),
    ],
)
def test_types_are_taken_from_attributes_arguments_or_annotations(
    env_class: type, types: tuple[type[BaseModel], ...]
) -> None:
    definition = definition_of_class(f"{__name__}:{env_class.__name__}", "sample")
    assert (definition.action_cls, definition.observation_cls, definition.state_cls) == types


def test_an_app_that_names_no_types_is_served() -> None:
    """As upstream's `create_app(Tools, None, None)`, of tools alone."""
    app = SimpleNamespace(routes=[])
    server = SimpleNamespace(_env_factory=Untyped, action_cls=None, observation_cls=None)
    definition = upstream_project._definition(server, app, app, "tools")
    assert (definition.action_cls, definition.observation_cls) == (AnyAction, Observation)
    assert definition.reset_observation_cls is Observation


def made(factory: Any) -> Definition:
    return Definition("n", factory, EchoAction, EchoObservation, State, EchoObservation)


def no_environment() -> EchoEnvironment:
    raise OSError("no licence")


def in_two_lines() -> EchoEnvironment:
    made = EchoEnvironment()
    made.reset()
    return made


def slow() -> EchoEnvironment:
    threading.Event().wait()
    return EchoEnvironment()


def slow_in_two_lines() -> EchoEnvironment:
    made = slow()
    made.reset()
    return made


@pytest.mark.parametrize(
    ("factory", "answer"),
    [
        (EchoEnvironment, (True, "EchoEnvironment")),
        (Untyped, (False, "Untyped")),
        (functools.partial(EchoEnvironment), (True, "EchoEnvironment")),
        (lambda: EchoEnvironment(), (True, "EchoEnvironment")),
        (in_two_lines, (True, "EchoEnvironment")),
        (no_environment, (False, "no_environment")),
    ],
)
def test_a_factory_functions_class_is_found(factory: Any, answer: tuple[bool, str]) -> None:
    failures: list[str] = []
    assert supports_concurrency(made(factory), failures.append) == answer
    assert bool(failures) == (factory is no_environment)
    assert all(text.startswith(f"OSError: no licence ({__file__}, line ") for text in failures)


def test_a_factory_that_takes_too_long_is_known_by_its_code() -> None:
    found = supports_concurrency(made(slow), pytest.fail, seconds=0.1)
    assert found == (True, "EchoEnvironment")
    assert children_of(os.getpid()) == []


def test_a_factory_that_takes_too_long_and_whose_code_names_no_class_runs_alone() -> None:
    found = supports_concurrency(made(slow_in_two_lines), pytest.fail, seconds=0.1)
    assert found == (False, "slow_in_two_lines")


def test_a_factory_that_ends_its_process_is_told() -> None:
    for end, how in (
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    ):
        failure = try_factory(made(end)).failure
        assert failure == f"the process that created an environment {how}"


@pytest.mark.parametrize(
    ("env", "is_async"),
    [
        (EchoEnvironment(), (False, False)),
        (AsyncStep(), (False, True)),
        (AsyncByName(), (True, False)),
        (Untyped(), (False, False)),
    ],
)
def test_async_methods_count_only_where_a_subclass_defines_them(
    env: Any, is_async: tuple[bool, bool]
) -> None:
    calls = Calls(env)
    assert (calls.signature.reset_is_async, calls.signature.step_is_async) == is_async


def test_keyword_arguments_are_filtered_by_signature() -> None:
    def some(seed: int, *, level: str) -> None:
        """Takes two."""

    assert keep_accepted(some, {"seed": 1, "level": "x", "mood": 2}) == {"seed": 1, "level": "x"}
    assert keep_accepted(EchoEnvironment().reset, {"mood": 2}) == {"mood": 2}
