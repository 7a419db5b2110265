# SPDX-License-Identifier: Apache-2.0
"""Which of the requests that have ended `status` has room for."""

from __future__ import annotations

import pytest

from openenvd.requests_db.records import Request
from openenvd.schema.states import RequestState, Schedule
from openenvd.server.api.routes_daemon import RECENT, worth_showing


def ended(
    operation: str, state: RequestState = RequestState.SUCCEEDED, request_id: str = "id"
) -> Request:
    return Request(request_id, operation, Schedule.SHORT, {}, state, 1.0)


@pytest.mark.parametrize("operation", ["check", "describe", "down", "probe"])
def test_ended_checks_and_downs_are_left_out_of_status_unless_they_failed(operation: str) -> None:
    failed, cancelled = (ended(operation, s) for s in (RequestState.FAILED, RequestState.CANCELLED))
    assert worth_showing([ended(operation), failed, cancelled], []) == [failed, cancelled]


def test_many_downs_hide_no_launch() -> None:
    downs = [ended("down") for _ in range(RECENT)]
    assert worth_showing([*downs, *(ended("launch") for _ in range(RECENT + 1))], []) == [
        ended("launch") for _ in range(RECENT)
    ]


def test_a_failed_launch_stays_in_status_however_many_requests_have_ended_since() -> None:
    """Once: it may be among the latest ones."""
    old, new = (ended("launch", RequestState.FAILED, request_id) for request_id in ("old", "new"))
    later = [ended("bench") for _ in range(RECENT - 1)]
    shown = worth_showing([new, *later, old], [new, old])
    assert shown == [new, *later, old]
