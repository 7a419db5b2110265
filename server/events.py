# SPDX-License-Identifier: Apache-2.0
"""Events for subscribers (`EventBus`), and log files that are followed; nothing polls the database.

    dispatcher thread ──publish_from_thread──▶ loop ──▶ EventBus ──▶ Subscription (one per waiter)
    API, reconciler   ──publish────────────────┘

A subscription holds what has arrived and not yet been taken. It is bounded: a client that does not
read loses its place (`lagged`), must reconnect, and resumes from the database with `Last-Event-ID`;
the daemon's memory stays bounded. Everything here runs on the loop, except `publish_from_thread`.

Workers and replicas write their logs by file descriptor, so the daemon does not see the writes. Ten
times a second it reads the size of each log that is followed, and of no other.

A log that shrinks, because a shim has cut it, is read on from its new end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..requests_db.records import Event

MAX_WAITING_EVENTS = 10_000  # of one subscription


class Subscription:
    """The events that one waiter has not taken yet. `wake` is set when there are any."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.lagged = False
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Keep the event for the waiter, unless it has stopped reading."""
        if len(self._events) >= MAX_WAITING_EVENTS:
            self.lagged = True
        else:
            self._events.append(event)
        self.wake.set()

    def take(self) -> list[Event]:
        """Everything that has arrived, oldest first."""
        taken = list(self._events)
        self._events.clear()
        return taken

    async def next(self) -> list[Event]:
        """Wait until something arrives, and return it; return nothing after `wake_all`."""
        await self.wake.wait()
        self.wake.clear()
        return self.take()


class EventBus:
    """Hands every event to the subscriptions that want it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # By request id for the many short-lived waiters; None holds all others.
        self._subscriptions: dict[str | None, list[Subscription]] = {None: []}

    @contextmanager
    def subscribe(self, *, request_id: str | None = None) -> Iterator[Subscription]:
        """A subscription to one request, or to everything."""
        subscription = Subscription()
        self._subscriptions.setdefault(request_id, []).append(subscription)
        try:
            yield subscription
        finally:
            waiters = self._subscriptions[request_id]
            waiters.remove(subscription)
            if request_id is not None and not waiters:
                del self._subscriptions[request_id]

    def publish(self, events: Sequence[Event]) -> None:
        """Hand events out; on the loop only."""
        for event in events:
            for key in {event.request_id, None}:
                for subscription in self._subscriptions.get(key, ()):
                    subscription.put(event)

    def wake_all(self) -> None:
        """Wake every subscription: the daemon stops."""
        for waiters in self._subscriptions.values():
            for subscription in waiters:
                subscription.wake.set()

    def publish_from_thread(self, events: Sequence[Event]) -> None:
        """Hand events out, from any thread; drop them when the loop has closed."""
        if not events:
            return
        try:
            self._loop.call_soon_threadsafe(self.publish, events)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


POLL_INTERVAL_SECONDS = 0.1
MAX_READ_BYTES = 256 * 1024
TAIL_BLOCK_BYTES = 64 * 1024


class LogFile:
    """One log, read on from `offset`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def pieces(self, *, final: bool = False) -> Iterator[str]:
        """Yield the whole lines since the last call; with `final`, the unfinished one too."""
        while text := self._read(final):
            yield text

    def _read(self, final: bool) -> str:
        try:
            with self.path.open("rb") as file:
                # Of a file that was cut, from its new end.
                self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
                file.seek(self.offset)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return ""
        if not final and len(data) < MAX_READ_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data.decode("utf-8", "replace")

    def skip(self, keep_bytes: int) -> bool:
        """Leave out text beyond the last `keep_bytes`, in whole lines; return whether some was."""
        start = (_size_of(self.path) or 0) - keep_bytes
        if start <= self.offset:
            return False
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(start)
            file.readline(MAX_READ_BYTES)
            self.offset = file.tell()
        return True


def offset_of_last_lines(path: Path, count: int, block_bytes: int = TAIL_BLOCK_BYTES) -> int:
    """Find the offset in bytes of the last `count` lines; blocks while it reads them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if count == 0 or size == 0:
                return size
            rest = size - 1  # the newline that ends the last line starts no other
            for start in range(rest // block_bytes * block_bytes, -1, -block_bytes):
                file.seek(start)
                block = file.read(min(block_bytes, rest - start))
                index = len(block)
                while count and (index := block.rfind(b"\n", 0, index)) >= 0:
                    count -= 1
                if not count:
                    return start + index + 1
            return 0
    except FileNotFoundError:
        return 0


@contextmanager
def followed(path: Path, wake: asyncio.Event) -> Iterator[None]:
    """Set `wake` whenever a log has another size, until the block ends; on the loop."""
    looking = asyncio.create_task(_look(path, wake), name=f"follow {path.name}")
    try:
        yield
    finally:
        looking.cancel()


async def _look(path: Path, wake: asyncio.Event) -> None:
    before = None
    while True:
        size = _size_of(path)
        if size not in (None, before):
            wake.set()
        before = size
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # it is not there yet, or no more
        return path.stat().st_size
    return None
