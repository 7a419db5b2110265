# SPDX-License-Identifier: Apache-2.0
"""Decisions about replicas, as tables of plain values: restarts, numbers and shares."""

import pytest

from openenvd.environments.replica_policy import (
    BUDGET_EXITS,
    BUDGET_WINDOW_SECONDS,
    DOWN_SHARE,
    FIRST_PAUSE_SECONDS,
    HEALTHY_SECONDS,
    UP_SHARE,
    Decision,
    DownWindow,
    GiveUp,
    Occupancy,
    RestartAfter,
    Scaling,
    decide,
    restart_decision,
    share_sessions,
    wanted_replicas,
)
from openenvd.schema.errors import InvalidSpec

NOW = 10_000.0


def exits(count: int, *, apart: float = 1.0) -> list[float]:
    return [NOW - apart * (count - 1 - n) for n in range(count)]


@pytest.mark.parametrize(
    ("times", "ready_for", "decision"),
    [
        *((exits(count), None, RestartAfter(2.0 ** (count - 2))) for count in range(1, 6)),
        (exits(BUDGET_EXITS + 1), 1.0, GiveUp("it exited 6 times within 10 minutes")),
        # Exits before the window do not count, nor any after a healthy minute.
        ([*[NOW - BUDGET_WINDOW_SECONDS - 1] * 50, NOW], None, RestartAfter(0.5)),
        (exits(50), HEALTHY_SECONDS, RestartAfter(FIRST_PAUSE_SECONDS, forgiven=True)),
        (exits(3), HEALTHY_SECONDS - 0.1, RestartAfter(2.0)),
    ],
)
def test_a_replica_that_exits_is_restarted_later_each_time_within_a_budget(
    times: list[float], ready_for: float | None, decision: RestartAfter | GiveUp
) -> None:
    ready_since = None if ready_for is None else NOW - ready_for
    assert restart_decision(times, ready_since=ready_since, now=NOW) == decision


SCALING = Scaling(least=1, most=8, down_seconds=60.0)


@pytest.mark.parametrize(
    ("replicas", "sessions", "wanted"),
    [
        # slots of each: 10
        (1, 0, 1),
        (1, 8, 1),  # UP_SHARE is what may be taken
        (1, 9, 2),
        (1, 10, 2),
        (2, 16, 2),
        (2, 17, 3),
        (2, 20, 4),  # all of it: so that 20 take no more than TARGET_SHARE
        (4, 40, 7),
        (7, 70, 8),  # no more than the most
        (8, 80, 8),
        (2, 6, 2),  # one alone would have more than DOWN_SHARE taken
        (2, 5, 1),
        (8, 36, 8),
        (8, 35, 6),
        (8, 1, 1),
        (8, 0, 1),
        (0, 0, 1),  # no fewer than the least
    ],
)
def test_replicas_follow_the_share_of_slots_that_is_taken(
    replicas: int, sessions: int, wanted: int
) -> None:
    assert wanted_replicas(Occupancy(replicas, 10, sessions), SCALING) == wanted


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 10, 64, 1024])
def test_a_change_is_never_the_reason_for_the_next_one(slots: int) -> None:
    scaling = Scaling(1, 1000, 60.0)
    for replicas in range(1, 12):
        for sessions in range(0, slots * replicas + 1, max(1, slots // 7)):
            wanted = wanted_replicas(Occupancy(replicas, slots, sessions), scaling)
            assert wanted_replicas(Occupancy(wanted, slots, sessions), scaling) == wanted


def test_more_are_added_at_once_and_are_never_taken_away_for_the_same_sessions() -> None:
    assert DOWN_SHARE < UP_SHARE
    seen = Occupancy(2, 10, 17)
    more = decide(seen, SCALING, None, NOW).replicas
    assert decide(Occupancy(more, 10, 17), SCALING, None, NOW) == Decision(more)
    assert decide(Occupancy(1, 10, 10), SCALING, DownWindow(NOW - 5, 1), NOW) == Decision(2)
    assert decide(Occupancy(4, 10, 25), SCALING, DownWindow(NOW - 59, 1), NOW) == Decision(4)


@pytest.mark.parametrize(
    ("window", "now", "decision"),
    [
        (None, NOW, Decision(4, DownWindow(NOW, 1), NOW + 60)),
        (DownWindow(NOW, 1), NOW + 59.9, Decision(4, DownWindow(NOW, 1), NOW + 60)),
        (DownWindow(NOW, 1), NOW + 60, Decision(1)),
        (DownWindow(NOW, 3), NOW + 30, Decision(4, DownWindow(NOW, 3), NOW + 60)),  # more before
        (DownWindow(NOW, 3), NOW + 60, Decision(3)),
    ],
)
def test_fewer_are_enough_when_they_have_been_for_a_while(
    window: DownWindow | None, now: float, decision: Decision
) -> None:
    assert decide(Occupancy(4, 10, 2), SCALING, window, now) == decision


@pytest.mark.parametrize(
    ("max_sessions", "replicas", "most", "shares"),
    [
        (None, 2, None, [None, None]),
        (64, 1, None, [64]),
        (7, 3, None, [3, 2, 2]),
        (3, 3, None, [1, 1, 1]),
        (16, 2, 8, [2, 2]),  # of what scales itself: its share of the most
        (17, 3, 8, [3, 2, 2]),
        (None, 2, 8, [None, None]),
    ],
)
def test_sessions_are_shared_evenly(
    max_sessions: int | None, replicas: int, most: int | None, shares: list[int | None]
) -> None:
    assert share_sessions(max_sessions, replicas, most=most) == shares


def test_fewer_sessions_than_replicas_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="cannot share 2 sessions"):
        share_sessions(2, 3)
