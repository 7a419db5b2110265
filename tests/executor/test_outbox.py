# SPDX-License-Identifier: Apache-2.0
"""In which order the executor tells what it has to tell."""

from __future__ import annotations

import pytest

from openenvd.executor.messages import (
    LONG,
    Cancelled,
    ExecutorEvent,
    Progressed,
    RoomFreed,
    Started,
)
from openenvd.executor.supervisor.event_buffer import Outbox


def test_what_another_thread_noted_is_told_before_what_is_heard_after_it() -> None:
    told: list[ExecutorEvent] = []
    outbox = Outbox(told.append)
    outbox.notify(started := Started("a", "long-1", 1, 1.0, 1.0))
    outbox.take_notices()
    outbox.add(progressed := Progressed("a", {}, 2.0))
    outbox.tell()
    assert told == [started, progressed]


def test_room_is_told_once_and_after_the_outcomes_that_made_it() -> None:
    told: list[ExecutorEvent] = []
    outbox = Outbox(told.append)
    outcomes = [Cancelled("a", 1.0), Cancelled("b", 1.0)]
    for outcome in outcomes:
        outbox.add_room(LONG)
        outbox.add(outcome)
    outbox.tell()
    outbox.tell()
    assert told == [*outcomes, RoomFreed(LONG)]


def test_a_listener_that_fails_misses_that_event_alone(caplog: pytest.LogCaptureFixture) -> None:
    told: list[ExecutorEvent] = []

    def listen(event: ExecutorEvent) -> None:
        told.append(event)
        if len(told) == 1:
            raise ValueError("this one is too much")

    outbox = Outbox(listen)
    events = [Cancelled("a", 1.0), Cancelled("b", 1.0)]
    for event in events:
        outbox.add(event)
    outbox.tell()
    assert told == events
    assert "failed on Cancelled" in caplog.text
