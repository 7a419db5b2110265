# SPDX-License-Identifier: Apache-2.0
"""Where an output with times is gone on in, whatever the order of its times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from openenvd.environments.engines.instance_logs import pieces_after, since_of


def log_of(*seconds: float) -> list[bytes]:
    return [f"2026-05-04T10:00:{at:012.9f}Z {n}\n".encode() for n, at in enumerate(seconds)]


def numbers(frames: Sequence[bytes], cursor: str | None) -> list[int]:
    return [int(chunk.data) for chunk in pieces_after(frames, cursor)]


@pytest.mark.parametrize(
    "seconds",
    [
        (1.0, 2.0, 3.0),
        (1.0, 1.0, 1.0, 2.0, 2.0),  # of one time
        (1.3, 1.1, 1.4, 1.2, 1.5),  # of two streams that are copied side by side
        (1.9, 2.1, 1.95, 2.2, 2.0, 2.3),
    ],
)
def test_each_piece_is_once_on_one_side_of_any_cursor(seconds: tuple[float, ...]) -> None:
    frames = log_of(*seconds)
    cursors = [chunk.cursor for chunk in pieces_after(frames, None)]
    for place, cursor in enumerate(cursors):
        assert numbers(frames, cursor) == list(range(place + 1, len(frames)))


def test_of_a_log_without_the_cursors_piece_what_is_later_is_left() -> None:
    frames = log_of(1.0, 2.0, 3.0, 3.5, 9.0)
    assert numbers(frames[2:], "2026-05-04T10:00:02.000000000Z#1") == [2, 3, 4]
    assert numbers(frames[2:3], "2026-05-04T10:00:02.000000000Z#1") == [2]


def test_what_is_asked_for_again_begins_before_all_that_may_stand_behind_the_cursor() -> None:
    assert since_of(None) is None
    assert since_of("2026-05-04T10:00:02.250000000Z#3") == datetime(
        2026, 5, 4, 10, 0, 1, tzinfo=UTC
    )
