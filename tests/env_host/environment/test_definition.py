# SPDX-License-Identifier: Apache-2.0
"""What is learned of a class, what is decided by it, and where its environments are created."""

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from openenvd.env_host.bundled.benchmark.environment import (
    BenchmarkEnvironment,
    SyncBenchmarkEnvironment,
)
from openenvd.env_host.bundled.echo.environment import EchoAction, EchoEnvironment, EchoObservation
from openenvd.env_host.environment import instances, plan, upstream_project
from openenvd.env_host.environment.definition import AnyAction, Definition, definition_of_class
from openenvd.env_host.environment.interfaces import Action, Observation, State
from openenvd.env_host.environment.plan import supports_concurrency, try_factory
from openenvd.env_host.startup import stacks_signal
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
    assert all(text.startswith(f"OSError: no licence ({__file__}:") for text in failures)


@pytest.mark.parametrize(
    ("factory", "found"),
    [(slow, (True, "EchoEnvironment")), (slow_in_two_lines, (False, "slow_in_two_lines"))],
)
def test_a_slow_factory_is_known_by_its_code(factory: Any, found: tuple[bool, str]) -> None:
    before = children_of(os.getpid())
    assert supports_concurrency(made(factory), pytest.fail, seconds=0.1) == found
    assert children_of(os.getpid()) == before


ONE = EchoEnvironment()


@pytest.mark.parametrize(
    ("factory", "is_shared"),
    [
        (lambda: ONE, True),
        (functools.cache(EchoEnvironment), True),
        (functools.partial(EchoEnvironment), False),
        (in_two_lines, False),
        (EchoEnvironment, False),
    ],
)
def test_a_factory_that_gives_all_sessions_one_environment_is_told(
    factory: Any, is_shared: bool
) -> None:
    told, before = list[str](), children_of(os.getpid())
    supports_concurrency(made(factory), pytest.fail, differs=told.append)
    expected = "returns the same environment to each session, which only sessions of the same"
    assert [expected in each for each in told] == [True] * is_shared
    assert children_of(os.getpid()) == before


def test_the_place_where_a_factory_takes_long_is_logged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begun, logged = tmp_path / "begun", tmp_path / "logged"
    parent, err = os.getpid(), list[str]()
    monkeypatch.setattr(plan, "SLOW_SECONDS", 0.1)

    def wait_for(path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)

    def when_begun() -> int:
        if os.getpid() == parent:
            wait_for(begun)
        return stacks_signal()

    def late() -> EchoEnvironment:  # in a process of its own
        begun.touch()
        wait_for(logged)
        raise OSError("no licence")

    def read() -> None:
        while not re.search(rf'{__file__}", line \d+ in late\n', "".join(err)):
            err.append(capfd.readouterr().err)
            time.sleep(0.01)
        logged.touch()

    monkeypatch.setattr(plan, "stacks_signal", when_begun)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    failure = try_factory(made(late), None).failure or ""
    assert failure.startswith("OSError: no licence")
    reader.join()


def test_the_place_of_a_constructor_that_does_not_return_is_its_failure() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> EchoEnvironment:
        begun.set()
        go_on.wait()
        return EchoEnvironment()

    factory = instances.Factory(wait, may_use_loop=False)
    factory.note_slow(61.0)
    assert not factory.failure
    creating = threading.Thread(target=factory.create)
    creating.start()
    begun.wait()
    factory.note_slow(61.0)
    line = wait.__code__.co_firstlineno + 2
    assert factory.failure == (
        f"the constructor has not returned for 61 s ({__file__}:{line}, in wait)"
    )
    go_on.set()
    creating.join()
    assert factory.failure == ""


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
    calls = instances.Calls(env)
    assert (calls.signature.reset_is_async, calls.signature.step_is_async) == is_async


def test_keyword_arguments_are_filtered_by_signature() -> None:
    def some(seed: int, *, level: str) -> None:
        """Takes two."""

    assert instances.keep_accepted(some, {"seed": 1, "level": "x", "mood": 2}) == {
        "seed": 1,
        "level": "x",
    }
    assert instances.keep_accepted(EchoEnvironment().reset, {"mood": 2}) == {"mood": 2}


# Where environments are created: threads, or the loop for what has been seen to be quick


def test_the_factory_moves_to_the_loop_when_quick_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = instances.Factory(BenchmarkEnvironment, may_use_loop=True)
    assert factory.create_on_loop() is None
    factory.create()
    assert isinstance(factory.create_on_loop(), BenchmarkEnvironment)
    with monkeypatch.context() as slow:
        slow.setattr(time, "monotonic", count(0.0, 2 * instances.STALL_SECONDS).__next__)
        assert [bool(factory.create_on_loop()) for _ in range(instances.MAX_STALLS + 1)] == [
            *[True] * instances.MAX_STALLS, False,
        ]  # fmt: skip
    factory.create()
    assert not factory.uses_loop


@pytest.mark.parametrize(
    ("kind", "may_use_loop"), [(SyncBenchmarkEnvironment, True), (BenchmarkEnvironment, False)]
)
def test_synchronous_environments_and_those_of_one_thread_stay_there(
    kind: Any, may_use_loop: bool
) -> None:
    factory = instances.Factory(kind, may_use_loop=may_use_loop)
    factory.create()
    assert not factory.uses_loop


@pytest.mark.parametrize("seconds", [instances.QUICK_CPU_SECONDS, instances.QUICK_SECONDS])
def test_one_that_is_slow_on_a_thread_is_created_there(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """By CPU time, or by the wall clock when it waits."""
    clock = "thread_time" if seconds == instances.QUICK_CPU_SECONDS else "monotonic"
    monkeypatch.setattr(time, clock, count(0.0, seconds).__next__)
    factory = instances.Factory(BenchmarkEnvironment, may_use_loop=True)
    factory.create()
    assert not factory.uses_loop


def test_a_factory_of_both_kinds_is_left_to_threads() -> None:
    kinds: Iterator[Any] = iter(
        [BenchmarkEnvironment, SyncBenchmarkEnvironment, BenchmarkEnvironment]
    )
    factory = instances.Factory(lambda: next(kinds)(), may_use_loop=True)
    factory.create()
    assert isinstance(factory.create_on_loop(), SyncBenchmarkEnvironment)
    factory.create()
    assert not factory.uses_loop


def test_a_factory_that_fails_on_the_loop_is_left_to_threads() -> None:
    def function() -> Any:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("a loop is running here")
        return BenchmarkEnvironment()

    def make_on_thread() -> bool:
        thread = threading.Thread(target=factory.create)
        thread.start()
        thread.join()
        return factory.uses_loop

    factory = instances.Factory(function, may_use_loop=True)
    assert make_on_thread()
    assert factory.create_on_loop() is None
    assert not make_on_thread()  # for good


def no_display(file: str) -> Any:
    exec(compile("raise OSError('no display')", file, "exec"))


def port(number: int) -> Any:
    raise RuntimeError(f"port {number} is taken")


@pytest.mark.parametrize(
    ("failing", "causes"),
    [
        ([lambda: port(0), *[lambda: no_display("one.py")] * 3], ["port 0", "no display"]),
        ([lambda: no_display("one.py"), lambda: no_display("two.py")] * 2, ["no display"] * 2),
        ([lambda: port(0), lambda: port(1), lambda: port(2)], ["port 0"]),
    ],
    ids=["each cause", "the same line of another file", "a message that differs each time"],
)
def test_the_traceback_of_each_cause_of_a_failure_is_logged_once(
    failing: list[Callable[[], Any]], causes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(failing)
    factory = instances.Factory(lambda: next(calls)(), may_use_loop=True)
    for _ in failing:
        with pytest.raises((RuntimeError, OSError)) as raised:
            factory.create()
    tracebacks = [record.exc_text or "" for record in caplog.records]
    assert len(tracebacks) == len(causes)
    assert all(cause in text for cause, text in zip(causes, tracebacks, strict=True))
    assert "in <lambda>" in tracebacks[0]
    assert factory.failure is not None
    assert factory.failure.startswith(f"{type(raised.value).__name__}: {raised.value} (")
