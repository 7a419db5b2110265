# SPDX-License-Identifier: Apache-2.0
"""Which share of the new sessions each replica gets."""

from __future__ import annotations

import pytest

from openenvd.environments.replica_policy import Load, is_calm, weights


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([], []),
        ([(0, 100)], []),
        ([(0, 100), (0, 100)], []),
        ([(30, 100), (0, 100), (10, 100)], []),  # nearly even: as many each
        ([(50, 100), (0, 100)], []),
        ([(51, 100), (0, 100)], [4, 16]),  # rounded down to a power of two
        ([(80, 100), (0, 100)], [2, 16]),
        ([(100, 100), (0, 100)], [1, 16]),  # full, and one that was added
        ([(120, 60), (0, 60)], [1, 16]),  # its share is another by now
        ([(100, 100), (100, 100)], []),  # all are full
        ([(100, 100), (100, 100), (98, 100)], [1, 1, 16]),
        ([(0, 10), (0, 100)], [1, 16]),  # of other sizes
        ([(0, 40), (0, 100), (0, 80)], [4, 16, 8]),
    ],
)
def test_replicas_with_more_room_get_more(
    loads: list[tuple[int, int]], expected: list[int]
) -> None:
    found = weights({number: Load(*load) for number, load in enumerate(loads, 3)})
    assert found == dict(enumerate(expected, 3))


@pytest.mark.parametrize(
    ("before", "now", "calm"),
    [
        ([10, 10], [10, 10], True),
        ([10, 10], [4, 16], True),
        ([10, 10], [3, 10], False),
        ([10, 10], [10, 17], False),
        ([10], [10, 0], False),  # one has come
        ([10, 10], [10], True),
    ],
)
def test_weights_wait_while_a_crowd_comes_or_leaves(
    before: list[int], now: list[int], calm: bool
) -> None:
    first, second = (
        {number: Load(sessions, 100) for number, sessions in enumerate(each)}
        for each in (before, now)
    )
    assert is_calm(first, second) is calm
