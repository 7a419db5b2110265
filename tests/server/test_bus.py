# SPDX-License-Identifier: Apache-2.0
"""Who is woken by which event, and what becomes of those that do not read."""

import asyncio
import threading

import pytest

from openenvd.requests_db.records import Event
from openenvd.server import events
from openenvd.server.events import EventBus

from .conftest import WAIT_SECONDS


def event(seq: int = 1, *, request_id: str | None = None) -> Event:
    return Event(seq, 1.0, "request.state", request_id)


async def test_a_waiter_hears_of_its_request_or_of_everything_or_is_woken(bus: EventBus) -> None:
    with bus.subscribe(request_id="a") as one, bus.subscribe() as everything:
        bus.publish([event(1, request_id="b"), event(2, request_id="a"), event(3)])
        assert [e.seq for e in one.take()] == [2]
        told = await asyncio.wait_for(everything.next(), WAIT_SECONDS)
        assert [e.seq for e in told] == [1, 2, 3]
    with bus.subscribe() as everything, bus.subscribe(request_id="a") as one:
        bus.wake_all()
        assert [await everything.next(), await one.next()] == [[], []]


async def test_events_of_a_thread_arrive_in_its_order(bus: EventBus) -> None:
    def publish() -> None:
        for seq in range(100):
            bus.publish_from_thread([event(seq)])

    thread = threading.Thread(target=publish)
    heard: list[Event] = []
    with bus.subscribe() as subscription:
        thread.start()
        async with asyncio.timeout(WAIT_SECONDS):
            while len(heard) < 100:
                heard += await subscription.next()
    thread.join()
    assert [e.seq for e in heard] == list(range(100))


async def test_a_subscriber_that_does_not_read_lags_and_its_events_are_bounded(
    bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_EVENTS", 3)
    with bus.subscribe() as slow, bus.subscribe(request_id="a") as other:
        bus.publish([event(seq) for seq in range(10)])
        bus.publish([event(10, request_id="a")])
        assert (slow.lagged, len(slow.take())) == (True, 3)
        assert (other.lagged, len(other.take())) == (False, 1)


def test_a_thread_that_publishes_after_the_end_is_not_harmed() -> None:
    loop = asyncio.new_event_loop()
    bus = EventBus(loop)
    loop.close()
    bus.publish_from_thread([event()])
