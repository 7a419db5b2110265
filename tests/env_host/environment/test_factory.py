# SPDX-License-Identifier: Apache-2.0
"""Where environments are created: threads, or the loop for what has been seen to be quick."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from openenvd.env_host.bundled.benchmark.environment import (
    BenchmarkEnvironment,
    SyncBenchmarkEnvironment,
)
from openenvd.env_host.environment.instances import (
    MAX_STALLS,
    QUICK_CPU_SECONDS,
    QUICK_SECONDS,
    STALL_SECONDS,
    Factory,
)


def test_the_factory_moves_to_the_loop_after_a_quick_first_creation() -> None:
    factory = Factory(BenchmarkEnvironment, may_use_loop=True)
    assert factory.create_on_loop() is None
    factory.create()
    assert isinstance(factory.create_on_loop(), BenchmarkEnvironment)


@pytest.mark.parametrize(
    ("kind", "may_use_loop"), [(SyncBenchmarkEnvironment, True), (BenchmarkEnvironment, False)]
)
def test_synchronous_environments_and_those_of_one_thread_stay_there(
    kind: Any, may_use_loop: bool
) -> None:
    factory = Factory(kind, may_use_loop=may_use_loop)
    factory.create()
    assert not factory.uses_loop


@pytest.mark.parametrize("seconds", [QUICK_CPU_SECONDS, QUICK_SECONDS])
def test_one_that_is_slow_on_a_thread_is_created_there(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """By CPU time, or by the wall clock when it waits."""
    clock = "thread_time" if seconds == QUICK_CPU_SECONDS else "monotonic"
    monkeypatch.setattr(time, clock, count(0.0, seconds).__next__)
    factory = Factory(BenchmarkEnvironment, may_use_loop=True)
    factory.create()
    assert not factory.uses_loop


def test_creations_that_hold_the_loop_up_go_back_to_threads_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = Factory(BenchmarkEnvironment, may_use_loop=True)
    factory.create()
    with monkeypatch.context() as slow:
        slow.setattr(time, "monotonic", count(0.0, 2 * STALL_SECONDS).__next__)
        assert [bool(factory.create_on_loop()) for _ in range(MAX_STALLS + 1)] == [
            *[True] * MAX_STALLS, False,
        ]  # fmt: skip
    factory.create()
    assert not factory.uses_loop


def test_a_factory_of_both_kinds_is_left_to_threads() -> None:
    kinds: Iterator[Any] = iter(
        [BenchmarkEnvironment, SyncBenchmarkEnvironment, BenchmarkEnvironment]
    )
    factory = Factory(lambda: next(kinds)(), may_use_loop=True)
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

    factory = Factory(function, may_use_loop=True)
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
    factory = Factory(lambda: next(calls)(), may_use_loop=True)
    for _ in failing:
        with pytest.raises((RuntimeError, OSError)) as raised:
            factory.create()
    tracebacks = [record.exc_text or "" for record in caplog.records]
    assert len(tracebacks) == len(causes)
    assert all(cause in text for cause, text in zip(causes, tracebacks, strict=True))
    assert "in <lambda>" in tracebacks[0]
    assert factory.failure is not None
    assert factory.failure.startswith(f"{type(raised.value).__name__}: {raised.value} (")
