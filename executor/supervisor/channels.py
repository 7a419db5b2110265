# SPDX-License-Identifier: Apache-2.0
"""The daemon's ends of the workers: a pipe and a sentinel each, in the supervisor's selector.

    pipe ────▶ readable ──▶ frames ──▶ on_frame        its end, or nonsense ──▶ on_pipe_end
         ◀──── writable ◀── what of a frame did not fit (`unclog`)
    sentinel ▶ readable ──▶ on_death

A worker's last words may still be in its pipe when its sentinel tells that it is dead:
`hear_the_rest` is called before it is buried. A sentinel stays open until then, because it is the
identity of the worker's group; its number names no other process meanwhile.

What is unsent of a frame is written under the pools' lock, as the frame was. `unclog` is called on
any thread; all else is the supervisor thread's.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from functools import partial
from typing import Any, Protocol

from ..errors import FrameError
from .pool import PooledWorker
from .wakeup import Alarm

log = logging.getLogger(__name__)

_READ_BYTES = 262_144


class Listener(Protocol):
    """Who acts on what is heard."""

    def on_frame(self, worker: PooledWorker, frame: dict[str, Any]) -> None:
        """The worker says something."""

    def on_pipe_end(self, worker: PooledWorker) -> None:
        """It will say nothing more."""

    def on_death(self, worker: PooledWorker) -> None:
        """It is dead, and may have said more than was heard."""


class Wires:
    """All pipes and sentinels."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        alarm: Alarm,
        lock: threading.Lock,
        listener: Listener,
    ) -> None:
        self._selector = selector
        self._alarm = alarm
        self._lock = lock  # the pools'
        self._listener = listener
        self._clogged: deque[PooledWorker] = deque()  # their frame did not fit into the pipe

    def connect(self, worker: PooledWorker) -> None:
        """Wait for what a new worker says, and for its death."""
        self._selector.register(worker.pipe, selectors.EVENT_READ, partial(self._on_pipe, worker))
        if worker.sentinel is not None:
            on_sentinel = partial(self._on_sentinel, worker)
            self._selector.register(worker.sentinel, selectors.EVENT_READ, on_sentinel)

    def unclog(self, worker: PooledWorker) -> None:
        """Have the rest of a frame written when the pipe has room. Any thread."""
        self._clogged.append(worker)
        self._alarm.ring()

    def watch_clogged(self) -> None:
        """Wait for room in the pipes that need it."""
        while self._clogged:
            worker = self._clogged.popleft()
            if not worker.pipe_ended:
                self._watch_pipe(worker, writing=True)

    def hear_the_rest(self, worker: PooledWorker) -> None:
        """The last words of a worker that is dead."""
        while not worker.pipe_ended and self._read(worker):
            pass
        self._forget_pipe(worker)

    def disconnect(self, worker: PooledWorker) -> None:
        """It is buried."""
        self._forget_sentinel(worker)
        worker.pipe.close()
        if worker.sentinel is not None:
            os.close(worker.sentinel)

    def _on_pipe(self, worker: PooledWorker) -> None:
        if self._has_ended(worker):
            return
        if worker.unsent:
            self._go_on_writing(worker)
        self._read(worker)
        if self._has_ended(worker):
            self._listener.on_pipe_end(worker)

    @staticmethod
    def _has_ended(worker: PooledWorker) -> bool:
        return worker.pipe_ended

    def _on_sentinel(self, worker: PooledWorker) -> None:
        if worker.watched:  # else it was buried earlier in this round
            self._forget_sentinel(worker)
            self._listener.on_death(worker)

    def _go_on_writing(self, worker: PooledWorker) -> None:
        with self._lock:
            done = worker.send_rest()
        if done:
            self._watch_pipe(worker, writing=False)

    def _read(self, worker: PooledWorker) -> bool:
        """Hear what has arrived; False when there is nothing (more) to hear."""
        try:
            data = worker.pipe.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._forget_pipe(worker)
            return False
        try:
            for frame in worker.reader.feed(data):
                self._listener.on_frame(worker, frame)
        except (FrameError, KeyError, TypeError):
            log.exception("worker %s (pid %d) speaks in tongues", worker.name, worker.pid)
            self._forget_pipe(worker)
        return not worker.pipe_ended

    def _watch_pipe(self, worker: PooledWorker, *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        self._selector.modify(worker.pipe, events, partial(self._on_pipe, worker))

    def _forget_pipe(self, worker: PooledWorker) -> None:
        if not worker.pipe_ended:
            worker.pipe_ended = True
            self._selector.unregister(worker.pipe)

    def _forget_sentinel(self, worker: PooledWorker) -> None:
        if worker.watched and worker.sentinel is not None:
            worker.watched = False
            self._selector.unregister(worker.sentinel)
