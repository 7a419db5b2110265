# SPDX-License-Identifier: Apache-2.0
"""What a pending request is said to wait for."""

from __future__ import annotations

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import NewRequest
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.states import Schedule
from openenvd.server.api.request_notes import MOST_COUNTED, reason_of, reason_of_shortage

LONG = Schedule.LONG


@pytest.mark.parametrize(
    ("ahead", "room", "is_short", "expected"),
    [
        (0, 1, False, "about to start"),
        (3, 4, False, "about to start"),
        (None, 1, False, "about to start"),
        (4, 4, False, "queued behind 4 LONG requests"),
        (1, 0, False, "queued behind 1 LONG request"),
        (0, 0, False, "waiting for a LONG worker"),
        (None, 0, False, "waiting for a LONG worker"),
        (0, 8, True, "waiting for a LONG worker"),
        (70, 8, True, "queued behind 70 LONG requests, the first of which waits for memory"),
        (MOST_COUNTED + 1, 0, False, f"queued behind more than {MOST_COUNTED} LONG requests"),
    ],
)
def test_the_reason_follows_from_who_is_ahead(
    ahead: int | None, room: int, is_short: bool, expected: str
) -> None:
    assert reason_of(LONG, ahead, room=room, is_short=is_short) == expected


def test_an_update_that_waits_for_memory_says_that_it_needs_both_generations() -> None:
    short = "waiting for memory: needs 210 MB, 95 MB free"
    assert reason_of_shortage(short, is_update=False) == short
    both = "an update needs memory for both generations at once"
    assert reason_of_shortage(short, is_update=True) == f"{short}; {both}"


async def test_a_place_counts_who_is_ahead_by_priority_and_arrival(
    store: AsyncStore, dispatch: WriteConnection
) -> None:
    async def submit(schedule: Schedule, priority: int = 0) -> int:
        new = NewRequest("check", schedule, {}, priority=priority)
        result = await store.write(submitting.submit, new, now=100.0)
        assert isinstance(result, Submitted)
        return result.request.seq

    running, first, second = [await submit(LONG) for _ in range(3)]
    await submit(Schedule.SHORT)
    dispatch.write(dispatching.claim, LONG, 1, 101.0)
    urgent = await submit(LONG, priority=1)
    assert await store.read(queries.places(LONG, 10)) == {urgent: 0, first: 1, second: 2}
    assert running not in await store.read(queries.places(LONG, 10))
    assert await store.read(queries.places(LONG, 2)) == {urgent: 0, first: 1}
