# SPDX-License-Identifier: Apache-2.0
"""Where environments are created: threads, or the loop for what has been seen to be quick."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from openenvd.env_host.bundled.benchmark.environment import (
    BenchmarkEnvironment,
    SyncBenchmarkEnvironment,
)
from openenvd.env_host.environment.instances import MAX_STALLS, Creation, Factory, Place, next_place

QUICK, SLOW = 0.001, 1.0


@pytest.mark.parametrize(
    ("before", "seen", "stalls", "place"),
    [
        (Place.THREAD, Creation(True, Place.THREAD, QUICK, QUICK), 0, Place.LOOP),
        (Place.THREAD, Creation(True, Place.THREAD, SLOW, QUICK), 0, Place.THREAD),
        (Place.THREAD, Creation(True, Place.THREAD, SLOW, SLOW), 0, Place.THREAD),
        (Place.LOOP, Creation(True, Place.THREAD, SLOW, SLOW), 0, Place.LOOP),  # begun before
        (Place.LOOP, Creation(True, Place.LOOP, QUICK, QUICK), 0, Place.LOOP),
        (Place.LOOP, Creation(True, Place.LOOP, SLOW, QUICK), MAX_STALLS - 1, Place.LOOP),
        (Place.LOOP, Creation(True, Place.LOOP, SLOW, QUICK), MAX_STALLS, None),
        (Place.THREAD, Creation(False, Place.THREAD, QUICK, QUICK), 0, Place.THREAD),
        (Place.LOOP, Creation(False, Place.LOOP, QUICK, QUICK), 0, None),  # a factory of both kinds
    ],
)
def test_asynchronous_environments_that_are_quick_are_created_on_the_loop(
    before: Place, seen: Creation, stalls: int, place: Place | None
) -> None:
    assert next_place(before, seen, stalls) is place


def test_the_factory_moves_to_the_loop_after_a_quick_first_creation() -> None:
    factory = Factory(BenchmarkEnvironment, may_use_loop=True)
    places = [factory.place]
    factory.create()
    assert [*places, factory.place] == [Place.THREAD, Place.LOOP]
    assert isinstance(factory.create_on_loop(), BenchmarkEnvironment)


def test_synchronous_environments_stay_on_threads() -> None:
    factory = Factory(SyncBenchmarkEnvironment, may_use_loop=True)
    factory.create()
    assert factory.place is Place.THREAD


def test_a_factory_that_fails_on_the_loop_is_left_to_threads() -> None:
    def function() -> Any:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("a loop is running here")
        return BenchmarkEnvironment()

    def make_on_thread() -> Place:
        thread = threading.Thread(target=factory.create)
        thread.start()
        thread.join()
        return factory.place

    factory = Factory(function, may_use_loop=True)
    assert make_on_thread() is Place.LOOP
    assert factory.create_on_loop() is None
    assert make_on_thread() is Place.THREAD  # for good


def test_one_thread_for_all_means_never_the_loop() -> None:
    factory = Factory(BenchmarkEnvironment, may_use_loop=False)
    factory.create()
    assert factory.place is Place.THREAD


def test_the_traceback_of_each_cause_of_a_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def function() -> Any:
        if caplog.records:
            raise OSError("no display")
        raise RuntimeError("port 40000 is taken")

    factory = Factory(function, may_use_loop=True)
    with pytest.raises(RuntimeError):
        factory.create()
    for _ in range(3):
        with pytest.raises(OSError, match="no display"):
            factory.create()
    tracebacks = [record.exc_text or "" for record in caplog.records]
    assert [text.splitlines()[-1] for text in tracebacks] == [
        "RuntimeError: port 40000 is taken",
        "OSError: no display",
    ]
    assert "in function" in tracebacks[0]


def test_the_same_line_of_another_file_is_another_cause(caplog: pytest.LogCaptureFixture) -> None:
    code = [compile("raise OSError('no display')", name, "exec") for name in ("one.py", "two.py")]
    files = iter([code[0], code[1], code[0]])
    factory = Factory(lambda: exec(next(files)), may_use_loop=True)
    for _ in range(3):
        with pytest.raises(OSError, match="no display"):
            factory.create()
    assert len(caplog.records) == 2


def test_a_message_that_differs_each_time_is_one_cause(caplog: pytest.LogCaptureFixture) -> None:
    numbers = iter(range(3))

    def function() -> Any:
        raise RuntimeError(f"port {next(numbers)} is taken")

    factory = Factory(function, may_use_loop=True)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            factory.create()
    assert len(caplog.records) == 1
    assert factory.failure is not None
    assert factory.failure.startswith("RuntimeError: port 2 is taken (")


def test_a_constructor_that_begins_to_fail_on_the_loop_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = iter([BenchmarkEnvironment()])

    def function() -> Any:
        if (env := next(made, None)) is None:
            raise RuntimeError("no more")
        return env

    factory = Factory(function, may_use_loop=True)
    factory.create()
    assert factory.place is Place.LOOP
    assert factory.create_on_loop() is None
    with pytest.raises(RuntimeError):
        factory.create()
    assert [record.levelname for record in caplog.records if record.exc_text] == ["WARNING"]
