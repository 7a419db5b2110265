# SPDX-License-Identifier: Apache-2.0
"""Connections that wait for a slot: in which order they are served, and that any may leave."""

from typing import Any

import pytest

from openenvd.env_host.ipc.fd_messages import Unanswered
from openenvd.env_host.ipc.scoreboard import Field, Scoreboard, now_microseconds
from openenvd.env_host.shard.admission import Admission
from openenvd.env_host.shard.connections import Arrival, Arrivals

SHARD = 0


class Queue:
    """An admission without room, and what it has served."""

    def __init__(self, shards: int = 1, timeout_seconds: float = 60.0) -> None:
        self._scoreboard = Scoreboard.create(shards)
        self.handed_over: list[tuple[Arrival, int]] = []
        self._arrivals = Arrivals(self._scoreboard[SHARD], self._ignore, self._ignore)
        self.served: list[Arrival] = []
        self.admission = Admission(
            self._scoreboard,
            SHARD,
            timeout_seconds=timeout_seconds,
            serve=self.served.append,
            hand_over=lambda *what: self.handed_over.append(what),
        )

    def arrive(self, since: int) -> Arrival:
        arrival = Arrival(self._arrivals, Unanswered(since, -1, b"a head"))
        self.admission.consider(arrival)
        return arrival

    def make_room(self, slots: int, shard: int = SHARD, *, is_ready: bool = True) -> None:
        counters = self._scoreboard[shard]
        counters[Field.PID] = counters[Field.READY] = int(is_ready)
        counters[Field.MAX_SESSIONS] = slots
        counters[Field.HEARTBEAT] = now_microseconds()
        self.admission._check()

    def _ignore(self, _: Any) -> None:
        pass


async def test_the_oldest_is_served_first_and_of_one_age_who_leaves_is_found() -> None:
    queue = Queue()
    now = now_microseconds()
    second, third, first = queue.arrive(now), queue.arrive(now), queue.arrive(now - 1)
    queue.make_room(2)
    assert queue.served == [first, second]
    queue.make_room(3)
    assert queue.served == [first, second, third]
    queue = Queue()
    now = now_microseconds()
    crowd = [queue.arrive(now) for _ in range(5)]
    for gone in (crowd[2], crowd[2], crowd[4], crowd[0]):
        queue.admission.forget(gone)
    assert len(queue.admission) == 2
    queue.make_room(5)
    assert queue.served == [crowd[1], crowd[3]]
    queue.admission.forget(crowd[1])


async def test_none_is_refused_while_a_shard_with_room_is_starting() -> None:
    """A refused connection is served with a ticket that says so."""
    queue = Queue(shards=2, timeout_seconds=0.0)
    queue.make_room(1, shard=1, is_ready=False)
    arrival = queue.arrive(now_microseconds())
    assert not queue.served
    assert not queue.handed_over
    queue.make_room(1, shard=1)
    assert (queue.served, queue.handed_over) == ([], [(arrival, 1)])
    queue.make_room(0, shard=1)
    refused = queue.arrive(now_microseconds())
    assert queue.served == [refused]


async def test_leaving_does_not_take_longer_in_a_longer_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in looks at connections: a crowd of thousands may leave at once."""
    looks = 0
    place: Any = Arrival.place

    def counted(arrival: Arrival) -> Any:
        nonlocal looks
        looks += 1
        return place.fget(arrival)

    queue = Queue()
    now = now_microseconds()
    crowd = [queue.arrive(now) for _ in range(1000)]
    monkeypatch.setattr(Arrival, "place", property(counted))
    for arrival in crowd:
        queue.admission.forget(arrival)
    assert len(queue.admission) == 0
    assert looks < 15 * len(crowd)
