# SPDX-License-Identifier: Apache-2.0
"""`Dispatcher`: the one thread that knows both the queue and the executor.

    API ──insert──▶ requests table                       BurstableExecutor
     └──submitted()──▶ wake ─┐                           ▲ submit     │ events (its supervisor)
                             ▼                           │            ▼
                 a turn: recorder.record ──ended──▶ claimer.claim   deliver() ──▶ recorder's inbox
                             │      └─▶ janitor.tidy     │
                             └──── events written ───────┴──▶ bus ──▶ waiting clients

The queue *is* the table. A turn first writes what the executor reported (`recorder.py`, one
transaction), then claims as many pending requests as there is room for (`claimer.py`, one statement
per schedule, SHORT first), then removes what is old (`janitor.py`). The thread sleeps until it is
woken (by an insert, an executor event or `stop`) or until one of the three is due.

There is no lock. Each of the three owns its state, and this thread alone calls it, with these
exceptions: `Recorder.deliver` appends to a deque and `Claimer.note_pending` sets a flag, from any
thread; `Claimer.cancel` uses a set whose operations are atomic. `RunningRequests` is written by
recorder and claimer, on this thread.

Failure cases:

* The database cannot be written (disk full). What was reported stays in the inbox, in order, and
  is tried again every `Timing.retry_seconds`; nothing is claimed meanwhile, so nothing runs
  unrecorded.
* An outcome that cannot be written as it is (no JSON, say) fails its own request, and no other.
* The daemon exits between claim and submit, or before an outcome is written: the request is left
  RUNNING and the next daemon's recovery decides about it.
* A claimed request finds no room after all (a worker died in between): it is released, and its
  attempt not counted.
* A claimed request's operation is not known here, because another version wrote it: the request
  fails, and no other.
"""

from __future__ import annotations

import logging
import threading
import time

from ...executor.messages import ExecutorEvent, Succeeded
from ...requests_db.errors import DatabaseError
from ...schema.states import Schedule
from .claimer import Claimer
from .janitor import Janitor
from .recorder import Recorder
from .running import DispatchContext

log = logging.getLogger(__name__)


class Dispatcher:
    """Feeds the executor from the queue, and the queue from the executor."""

    def __init__(self, context: DispatchContext) -> None:
        """Make the parts; nothing is claimed before `start`."""
        self.recorder = Recorder(context)
        self.claimer = Claimer(context, self.recorder)
        self._janitor = Janitor(context)
        self._retry_seconds = context.timing.retry_seconds
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._wake.set()  # requests that an earlier daemon left pending
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; what still runs stays RUNNING for the next daemon."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def submitted(self, schedule: Schedule) -> None:
        """Look for the request that was inserted (any thread)."""
        self.claimer.note_pending(schedule)
        self._wake.set()

    def deliver(self, event: ExecutorEvent) -> None:
        """Write what the executor reports, or go on with what is only prepared (any thread)."""
        if isinstance(event, Succeeded) and self.claimer.goes_on(event):
            self._wake.set()  # the worker is free
        else:
            self.report(event)

    def report(self, event: ExecutorEvent) -> None:
        """Write what a task of the daemon reports (any thread)."""
        self.recorder.deliver(event)
        self._wake.set()

    def _run(self) -> None:
        while self._await_work():
            try:
                ended = self.recorder.record()
                self.claimer.claim(ended)
                self._janitor.tidy()
            except DatabaseError as exc:
                log.error("the queue cannot be written, trying again: %s", exc)
                self.claimer.note_pending(*Schedule)  # that claim may have been the only one
                self._stopping.wait(self._retry_seconds)
                self._wake.set()

    def _await_work(self) -> bool:
        """Sleep until there is something to do; False when the thread is to end."""
        due_at = min(self.recorder.due_at(), self.claimer.due_at(), self._janitor.due_at())
        self._wake.wait(timeout=max(0.0, due_at - time.monotonic()))
        self._wake.clear()
        return not self._stopping.is_set()
