# SPDX-License-Identifier: Apache-2.0
"""When a replica that died is started again: tables of plain values."""

from __future__ import annotations

import pytest

from openenvd.environments.replica_policy import (
    BUDGET_EXITS,
    BUDGET_WINDOW_SECONDS,
    FIRST_PAUSE_SECONDS,
    HEALTHY_SECONDS,
    MAX_PAUSE_SECONDS,
    GiveUp,
    RestartAfter,
    pause_seconds,
    restart_decision,
)

NOW = 10_000.0


def exits(count: int, *, apart: float = 1.0) -> list[float]:
    return [NOW - apart * (count - 1 - n) for n in range(count)]


@pytest.mark.parametrize(("count", "pause"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0)])
def test_the_pause_doubles_with_every_exit(count: int, pause: float) -> None:
    decision = restart_decision(exits(count), ready_since=None, now=NOW)
    assert decision == RestartAfter(pause)


def test_the_pause_never_exceeds_its_bound() -> None:
    assert pause_seconds(1_000_000) == MAX_PAUSE_SECONDS


def test_an_exit_beyond_the_budget_ends_restarts_with_a_reason() -> None:
    decision = restart_decision(exits(BUDGET_EXITS + 1), ready_since=NOW - 1, now=NOW)
    assert decision == GiveUp("it exited 6 times within 10 minutes")


def test_exits_before_the_window_do_not_count() -> None:
    old = [NOW - BUDGET_WINDOW_SECONDS - 1] * 50
    assert restart_decision([*old, NOW], ready_since=None, now=NOW) == RestartAfter(0.5)


def test_earlier_exits_do_not_count_after_a_healthy_minute() -> None:
    decision = restart_decision(exits(50), ready_since=NOW - HEALTHY_SECONDS, now=NOW)
    assert decision == RestartAfter(FIRST_PAUSE_SECONDS, forgiven=True)


def test_being_ready_for_less_forgives_nothing() -> None:
    ready_since = NOW - HEALTHY_SECONDS + 0.1
    assert restart_decision(exits(3), ready_since=ready_since, now=NOW) == RestartAfter(2.0)
