# SPDX-License-Identifier: Apache-2.0
"""Where environments are created: threads, or the loop for what has been seen to be quick."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from openenvd.env_host.environment.factory import MOST_STALLS, Maker, Place, Seen, next_place
from openenvd.envs.benchmark.environment import BenchmarkEnvironment, SyncBenchmarkEnvironment

QUICK, SLOW = 0.001, 1.0


@pytest.mark.parametrize(
    ("before", "seen", "stalls", "place"),
    [
        (Place.THREAD, Seen(True, Place.THREAD, QUICK, QUICK), 0, Place.LOOP),
        (Place.THREAD, Seen(True, Place.THREAD, SLOW, QUICK), 0, Place.THREAD),
        (Place.THREAD, Seen(True, Place.THREAD, SLOW, SLOW), 0, Place.THREAD),
        (Place.LOOP, Seen(True, Place.THREAD, SLOW, SLOW), 0, Place.LOOP),  # begun before
        (Place.LOOP, Seen(True, Place.LOOP, QUICK, QUICK), 0, Place.LOOP),
        (Place.LOOP, Seen(True, Place.LOOP, SLOW, QUICK), MOST_STALLS - 1, Place.LOOP),
        (Place.LOOP, Seen(True, Place.LOOP, SLOW, QUICK), MOST_STALLS, None),
        (Place.THREAD, Seen(False, Place.THREAD, QUICK, QUICK), 0, Place.THREAD),
        (Place.LOOP, Seen(False, Place.LOOP, QUICK, QUICK), 0, None),  # a factory of both kinds
    ],
)
def test_the_loop_is_for_what_is_asynchronous_and_quick(
    before: Place, seen: Seen, stalls: int, place: Place | None
) -> None:
    assert next_place(before, seen, stalls) is place


def test_a_maker_learns_from_the_first_environment() -> None:
    maker = Maker(BenchmarkEnvironment, may_use_loop=True)
    places = [maker.place]
    maker.make()
    assert [*places, maker.place] == [Place.THREAD, Place.LOOP]
    assert isinstance(maker.make_on_loop(), BenchmarkEnvironment)


def test_synchronous_environments_stay_on_threads() -> None:
    maker = Maker(SyncBenchmarkEnvironment, may_use_loop=True)
    maker.make()
    assert maker.place is Place.THREAD


def test_a_factory_that_fails_on_the_loop_is_left_to_threads() -> None:
    def factory() -> Any:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("a loop is running here")
        return BenchmarkEnvironment()

    def make_on_thread() -> Place:
        thread = threading.Thread(target=maker.make)
        thread.start()
        thread.join()
        return maker.place

    maker = Maker(factory, may_use_loop=True)
    assert make_on_thread() is Place.LOOP
    assert maker.make_on_loop() is None
    assert make_on_thread() is Place.THREAD  # for good


def test_one_thread_for_all_means_never_the_loop() -> None:
    maker = Maker(BenchmarkEnvironment, may_use_loop=False)
    maker.make()
    assert maker.place is Place.THREAD
