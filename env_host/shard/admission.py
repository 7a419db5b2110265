# SPDX-License-Identifier: Apache-2.0
"""Decides which connection gets the next slot, and how long it waits: one `Admission` a shard.

    arrival, wants a session ──▶ `consider` ──room──▶ promised a slot, served here
                                     │ none
                                     ▼
                                  waiting ──oldest of all shards, room here──▶ served here
                                     │    ──oldest of all shards, room there─▶ handed over
                                     │    ──too long, a replica is left to ask▶ passed to it
                                     ▼ too long
                                  served here, with a ticket that says so: `CAPACITY_REACHED`

A client waits before its handshake is answered: until then a connection is only a descriptor and
the bytes of its head, and can be handed to whichever shard has room first. Only sessions that would
exceed a client's handshake timeout, or begin over HTTP, wait after it (`wait_for_room`). While
another shard that has room is starting, no connection is refused before `HANDSHAKE_SECONDS`.

A promise is kept until the session begins, in the same iteration or the next. One that is not used
(the client left, the handshake was invalid) is dropped after `PROMISE_SECONDS`.
"""

from __future__ import annotations

import asyncio
import bisect
import operator
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard, now_microseconds
from .connections import Arrival

HANDSHAKE_SECONDS = 8.0  # upstream's client gives a handshake 10 s
PROMISE_SECONDS = 1.0
CHECK_SECONDS = 0.01  # while a connection waits
FAIR_SECONDS = 0.05  # a connection that waits this much longer than another goes first

_place = operator.attrgetter("place")


class _Ticket(NamedTuple):
    """The decision about a connection, made before the connection asks for its slot."""

    issued_at: int
    rest_seconds: float | None  # how long it may still wait; None: it was promised a slot


class Admission:
    """The connections of one shard that wait for a slot; on the event loop only."""

    def __init__(
        self,
        scoreboard: Scoreboard,
        index: int,
        *,
        timeout_seconds: float,
        serve: Callable[[Arrival], None],
        hand_over: Callable[[Arrival, int], None],
        ask_peer: Callable[[Arrival], bool] = lambda _: False,
    ) -> None:
        """`ask_peer` passes a connection to another replica; False: none is left to ask."""
        self._scoreboard = scoreboard
        self._counters = scoreboard[index]
        self._others = scoreboard.others(index)
        self._timeout_seconds = timeout_seconds
        self._serve = serve
        self._hand_over = hand_over
        self._ask_peer = ask_peer
        self._waiting: list[Arrival] = []  # the oldest first
        self._tickets: deque[_Ticket] = deque()
        self._local: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._waiting)

    def consider(self, arrival: Arrival) -> None:
        """Serve a connection, hand it over, or let it wait."""
        bisect.insort(self._waiting, arrival, key=_place)
        self._check()

    def forget(self, arrival: Arrival) -> None:
        """Drop a connection whose client has left."""
        index = bisect.bisect_left(self._waiting, arrival.place, key=_place)
        if index < len(self._waiting) and self._waiting[index] is arrival:
            del self._waiting[index]
            self._publish()

    def changed(self) -> None:
        """Publish the counters after a session began or ended; look for free slots soon."""
        self._publish()
        if self._waiting or self._local:
            self._check_in(0.0)

    def take_promise(self) -> bool:
        """Take the slot that the next session was promised; False when it was promised none.

        The slot counts as promised until the session counts (`changed`). Otherwise, between the
        two, the supervisor would see room that does not exist.
        """
        self._drop_stale_tickets()
        if not self._tickets or self._tickets[0].rest_seconds is not None:
            return False
        self._tickets.popleft()
        return True

    async def wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        """Wait for room; False when the time to wait is over."""
        self._drop_stale_tickets()
        rest: float | None = self._timeout_seconds
        if self._tickets:
            rest = self._tickets.popleft().rest_seconds
            self._publish()
        if rest is None:
            return has_room()
        deadline = self._loop.time() + rest
        while not (has_room() and self._counters.room) and self._loop.time() < deadline:
            if self._stopped or self._counters[Field.DRAINING]:
                break
            await self._wait_locally(deadline)
        is_let_in = has_room() and self._counters.room > 0 and not self._counters[Field.DRAINING]
        self._counters.add(Field.REFUSED, not is_let_in)
        return is_let_in

    @property
    def is_full(self) -> bool:
        """Return whether no shard has room, not even one that is yet to be started."""
        return all(
            counters[Field.SESSIONS] + counters[Field.PROMISED] >= counters[Field.MAX_SESSIONS]
            for counters in self._scoreboard
        )

    @property
    def room(self) -> int:
        """The slots of this process that are neither taken nor promised."""
        return self._counters.room

    @property
    def totals(self) -> tuple[int, int]:
        """The sessions and the slots of all shards together."""
        slots = self._scoreboard
        counts = [(counters[Field.SESSIONS], counters[Field.MAX_SESSIONS]) for counters in slots]
        return sum(taken for taken, _ in counts), sum(most for _, most in counts)

    def stop(self) -> None:
        """Pass on all waiting connections, each of which is then refused with the reason."""
        self._stopped = True
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            self._admit(arrival, 0.0)
        for future in list(self._local):
            _settle(future)
        self._publish()

    async def _wait_locally(self, deadline: float) -> None:
        future = self._loop.create_future()
        self._local.append(future)
        try:
            await asyncio.wait({future}, timeout=deadline - self._loop.time())
        finally:
            if future in self._local:
                self._local.remove(future)

    def _check_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        self._drop_stale_tickets()
        self._place()
        self._expire()
        for future in list(self._local)[: self._counters.room]:
            _settle(future)
        self._publish()
        if self._waiting or self._tickets:
            self._check_in(CHECK_SECONDS if self._waiting else PROMISE_SECONDS)

    def _place(self) -> None:
        sent: Counter[int] = Counter()  # the others' counters do not show it yet
        while self._waiting:
            now = now_microseconds()
            index = place_of(self._waiting[0].since, self._counters, self._others, now)
            if index is None:
                return
            if index == self._counters.index:
                self._admit(self._waiting.pop(0), None)
            elif sent[index] < self._scoreboard[index].room:
                sent[index] += 1
                self._hand_over(self._waiting.pop(0), index)
            else:
                return

    def _expire(self) -> None:
        now = now_microseconds()
        before = min(self._timeout_seconds, HANDSHAKE_SECONDS)
        if not (self.is_full or self._counters[Field.DRAINING]):  # a shard with room is starting
            before = max(before, HANDSHAKE_SECONDS)
        rest = max(0.0, self._timeout_seconds - before)
        while self._waiting and now - self._waiting[0].since >= before * MICROSECONDS:
            if not self._ask_peer(arrival := self._waiting.pop(0)):
                self._admit(arrival, rest)

    def _admit(self, arrival: Arrival, rest_seconds: float | None) -> None:
        self._tickets.append(_Ticket(now_microseconds(), rest_seconds))
        self._publish()
        self._serve(arrival)

    def _drop_stale_tickets(self) -> None:
        oldest = now_microseconds() - int(PROMISE_SECONDS * MICROSECONDS)
        while self._tickets and self._tickets[0].issued_at < oldest:
            self._tickets.popleft()

    def _publish(self) -> None:
        counters = self._counters
        counters[Field.PROMISED] = sum(ticket.rest_seconds is None for ticket in self._tickets)
        counters[Field.WAITING] = len(self._waiting) + len(self._local)
        counters[Field.OLDEST_WAIT] = self._waiting[0].since if self._waiting else 0


def place_of(since: int, own: Counters, others: Sequence[Counters], now: int) -> int | None:
    """Return the shard that should serve a connection; None while the connection has to wait.

    The oldest connection of all shards goes first, as long as its own shard is responsive.
    """
    turning = [counters for counters in others if counters.is_responsive(now)]
    patience = int(FAIR_SECONDS * MICROSECONDS)
    if any(0 < counters[Field.OLDEST_WAIT] < since - patience for counters in turning):
        return None
    if own.room:
        return own.index
    roomy = max(turning, key=lambda counters: counters.room, default=None)
    return roomy.index if roomy is not None and roomy.room else None


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
