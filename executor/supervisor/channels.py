# SPDX-License-Identifier: Apache-2.0
"""The objects that the supervisor's thread waits for: pipes, sentinels, and a wake-up.

    pipe ────▶ readable ──▶ `read` ──▶ frames             at its end, `pipe_ended` is set
         ◀──── writable ◀── what did not fit of a frame   (`write_when_ready`, `write_rest`)
    sentinel ▶ readable: the worker has exited
    wake-up ─▶ readable: another thread has something for this one, or set an earlier deadline

The pipe of a worker that has exited may still hold frames: they are read before it is reaped. A
sentinel stays open until then, because it identifies the worker's process group: its pid names no
other process meanwhile.

The unsent rest of a frame is written under the pools' lock, as its beginning was.
`write_when_ready`, `wake` and `wake_by` are called on any thread; all else on the supervisor's.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .pool import PooledWorker

_READ_BYTES = 262_144
MAX_WAIT_SECONDS = 86_400.0

Handler = Callable[[], None]


class WakeUp:
    """Ends the wait of the supervisor's thread, at once or at a deadline."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._is_set = False
        self._deadline = math.inf  # no deadline is earlier; under the lock: all threads set it
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor that is readable after `wake`."""
        return self._reading

    def wake(self) -> None:
        """Wake the thread up; once is enough until it has woken. Any thread."""
        if not self._is_set:
            self._is_set = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._writing, b"!")

    def wake_by(self, deadline: float) -> None:
        """Keep the thread from waiting beyond the (monotonic) deadline. Any thread."""
        with self._lock:
            if deadline >= self._deadline:
                return
            self._deadline = deadline
        self.wake()

    def clear(self) -> None:
        """Be ready for the next `wake`."""
        # In this order: a wake-up that comes in between is noticed in the next round.
        with contextlib.suppress(BlockingIOError):
            os.read(self._reading, 64)
        self._is_set = False

    def is_due(self, now: float) -> bool:
        """Return whether a deadline may have passed."""
        return now >= self._deadline

    def seconds_left(self, now: float) -> float | None:
        """Return how long to wait; None: without end.

        A wait of a year is cut to a day, because the kernel's timers end at 2^31 ms. An early
        wake-up does no harm.
        """
        if self._deadline == math.inf:
            return None
        return min(max(0.0, self._deadline - now), MAX_WAIT_SECONDS)

    def set_next(self, next_deadline: Callable[[], float]) -> None:
        """Wait for the next deadline, after one has passed.

        Whoever sets a deadline records it for `next_deadline` first, and then calls `wake_by`. So
        this call finds it, or `wake_by` comes after this call.
        """
        with self._lock:
            self._deadline = next_deadline()

    def close(self) -> None:
        """Close both ends, when no thread waits any more."""
        os.close(self._reading)
        os.close(self._writing)


@dataclass(eq=False, slots=True)
class Channels:
    """The daemon's ends of the workers' pipes, and their sentinels."""

    _selector: selectors.BaseSelector
    _wake_up: WakeUp
    _lock: threading.Lock  # the pools'
    # A frame did not fit into their pipe
    _blocked: deque[PooledWorker] = field(default_factory=deque)

    def connect(self, worker: PooledWorker, on_pipe: Handler, on_exit: Handler) -> None:
        """Wait for what a new worker writes, and for its exit."""
        self._selector.register(worker.pipe, selectors.EVENT_READ, on_pipe)
        if worker.sentinel is not None:
            self._selector.register(worker.sentinel, selectors.EVENT_READ, on_exit)

    def write_when_ready(self, worker: PooledWorker) -> None:
        """Queue the rest of a frame, to be written when the pipe has room. Any thread."""
        self._blocked.append(worker)
        self._wake_up.wake()

    def watch_blocked(self) -> None:
        """Wait for room in the pipes that need it."""
        while self._blocked:
            worker = self._blocked.popleft()
            if not worker.pipe_ended:
                self._watch_pipe(worker, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def write_rest(self, worker: PooledWorker) -> None:
        """Go on writing a frame that did not fit."""
        with self._lock:
            done = worker.send()
        if done:
            self._watch_pipe(worker, selectors.EVENT_READ)

    def read(self, worker: PooledWorker) -> list[dict[str, Any]] | None:
        """Return the frames that have arrived; None when there is nothing to read now."""
        try:
            data = worker.pipe.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.end_pipe(worker)
            return None
        return worker.reader.feed(data)

    def end_pipe(self, worker: PooledWorker) -> None:
        """Read the worker's pipe no more."""
        if not worker.pipe_ended:
            worker.pipe_ended = True
            self._selector.unregister(worker.pipe)

    def end_sentinel(self, worker: PooledWorker) -> bool:
        """Watch the sentinel no more; False when it was not watched."""
        if not worker.sentinel_watched or worker.sentinel is None:
            return False
        worker.sentinel_watched = False
        self._selector.unregister(worker.sentinel)
        return True

    def disconnect(self, worker: PooledWorker) -> None:
        """Close the descriptors of a worker that is reaped."""
        self.end_pipe(worker)
        self.end_sentinel(worker)
        worker.pipe.close()
        if worker.sentinel is not None:
            os.close(worker.sentinel)

    def _watch_pipe(self, worker: PooledWorker, events: int) -> None:
        handler = self._selector.get_key(worker.pipe).data
        self._selector.modify(worker.pipe, events, handler)
