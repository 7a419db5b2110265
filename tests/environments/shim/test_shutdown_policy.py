# SPDX-License-Identifier: Apache-2.0
"""When a shim ends what it keeps: decisions, with a clock of the tests' own."""

from __future__ import annotations

import pytest

from openenvd.environments.shim.shutdown_policy import (
    GIVE_UP_SECONDS,
    REMOVED_SECONDS,
    RunDirectoryWatch,
    ShutdownPolicy,
    ShutdownStep,
)

NOW = 1000.0


def asked(grace_seconds: float) -> ShutdownPolicy:
    """An end that was asked for."""
    ending = ShutdownPolicy()
    assert ending.request(NOW, grace_seconds)
    return ending


def test_without_a_deadline_there_is_nothing_to_do() -> None:
    ending = ShutdownPolicy()
    assert ending.step(NOW) is ShutdownStep.WAIT
    assert not ending.is_requested


def test_the_server_is_killed_when_its_grace_is_over() -> None:
    ending = asked(5.0)
    assert ending.step(NOW + 4.9) is ShutdownStep.WAIT
    assert ending.step(NOW + 5.0) is ShutdownStep.KILL


def test_a_grace_below_nothing_is_none() -> None:
    assert asked(-3.0).step(NOW) is ShutdownStep.KILL


@pytest.mark.parametrize(("second", "ends_after"), [(1.0, 1.0), (60.0, 5.0)])
def test_a_second_stop_can_only_shorten_the_grace(second: float, ends_after: float) -> None:
    ending = asked(5.0)
    assert not ending.request(NOW, second)
    assert ending.deadline == NOW + ends_after


def test_what_is_drained_is_stopped_when_its_time_is_over_and_may_be_stopped_before() -> None:
    ending = ShutdownPolicy()
    assert ending.drain(NOW, 60.0)
    assert (ending.is_ending, ending.is_requested) == (True, False)
    assert ending.step(NOW + 59.9) is ShutdownStep.WAIT
    assert ending.step(NOW + 60.0) is ShutdownStep.STOP
    assert ending.request(NOW + 1.0, 5.0)
    assert ending.step(NOW + 6.0) is ShutdownStep.KILL


@pytest.mark.parametrize(("second", "ends_after"), [(1.0, 1.0), (600.0, 60.0)])
def test_a_second_drain_can_only_shorten_the_time(second: float, ends_after: float) -> None:
    ending = ShutdownPolicy()
    assert ending.drain(NOW, 60.0)
    assert not ending.drain(NOW, second)
    assert ending.deadline == NOW + ends_after


def test_a_drain_changes_nothing_of_a_stop() -> None:
    ending = asked(5.0)
    assert not ending.drain(NOW, 1.0)
    assert ending.step(NOW + 5.0) is ShutdownStep.KILL


def test_the_killed_are_waited_for_and_not_for_ever() -> None:
    ending = asked(5.0)
    ending.note_kill(NOW + 5.0)
    assert ending.step(NOW + 5.0) is ShutdownStep.WAIT
    assert ending.step(NOW + 5.0 + GIVE_UP_SECONDS) is ShutdownStep.GIVE_UP


def test_orphans_of_an_exited_server_are_killed_without_a_stop() -> None:
    ending = ShutdownPolicy()
    ending.note_kill(NOW)
    assert ending.step(NOW + GIVE_UP_SECONDS) is ShutdownStep.GIVE_UP
    assert not ending.is_requested


def test_a_stop_while_clearing_waits_no_second_grace_for_the_killed() -> None:
    ending = ShutdownPolicy()
    ending.note_kill(NOW)
    ending.request(NOW, 1.0)
    assert ending.step(NOW + 1.0) is ShutdownStep.GIVE_UP


def test_after_the_end_there_is_no_deadline_and_the_request_stays() -> None:
    ending = asked(0.0)
    ending.note_kill(NOW)
    ending.note_end()
    assert (ending.deadline, ending.step(NOW + 3600.0)) == (None, ShutdownStep.WAIT)
    assert ending.is_requested


def test_the_next_server_has_a_grace_of_its_own() -> None:
    ending = ShutdownPolicy()
    ending.note_kill(NOW)
    ending.note_end()
    ending.request(NOW, 5.0)
    assert ending.step(NOW + 5.0) is ShutdownStep.KILL


def test_a_home_missing_at_one_look_alone_is_not_removed() -> None:
    home = RunDirectoryWatch()
    seen = [(0.0, True), (REMOVED_SECONDS, False), (2 * REMOVED_SECONDS, True)]
    looks = [(home.look(NOW + at, is_missing=missing), home.is_missing) for at, missing in seen]
    assert looks == [(False, True), (False, False), (False, True)]


def test_a_home_that_stays_missing_is_gone() -> None:
    home = RunDirectoryWatch()
    assert not home.look(NOW, is_missing=True)
    assert not home.look(NOW + REMOVED_SECONDS / 2, is_missing=True)
    assert home.look(NOW + REMOVED_SECONDS, is_missing=True)
