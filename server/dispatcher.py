# SPDX-License-Identifier: Apache-2.0
"""The one thread that knows both the queue and the executor.

    API ──insert──▶ requests table                    BurstableExecutor
     └──submitted()──▶ wake ─┐                        ▲ submit     │ events (supervisor thread)
                             ▼                        │            ▼
                        ┌─ turn: record what happened ┴─ claim ◀─ deliver() ─ inbox
                        └─ publish the events written ──▶ hub ──▶ waiting clients

The queue *is* the table. A turn first writes what the executor reported (one transaction), then
claims as many pending requests as there is room for, in one statement per schedule, SHORT first.
The thread sleeps until somebody wakes it: an insert, an executor event, `stop`, or the time of the
next collection of old requests.

Failure cases:

* The database cannot be written (disk full). What was reported stays in the inbox, in order, and
  is tried again every `RETRY_SECONDS`; nothing is claimed meanwhile, so nothing runs unrecorded.
* The daemon dies between claim and submit, or before an outcome is written: the request is left
  RUNNING and the next daemon's recovery decides about it.
* A claimed request finds no room after all (a worker died in between): it is released, and its
  attempt not counted.

Owned by this thread: the store. Shared: the inbox (a deque: append and popleft are atomic), the
`_pending` flags (set by anyone, cleared before a claim, so that no insert is missed), `_wake`.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..executor import BurstableExecutor, NoRoom
from ..executor.messages import (
    Cancelled,
    Died,
    ExecutorEvent,
    Progressed,
    Raised,
    Started,
    Succeeded,
    Task,
)
from ..requests_db.errors import DatabaseError
from ..requests_db.records import Event, Request
from ..requests_db.states import Schedule
from ..requests_db.store import DispatchStore
from .outcomes import outcome_of
from .settings import Paths, Settings

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
COLLECT_EVERY_SECONDS = 600.0
MAX_CLAIM = 64  # a burst larger than this is claimed in several statements
CLAIM_ORDER = (Schedule.SHORT, Schedule.LONG)  # a SHORT request never waits behind LONG ones
SECONDS_PER_DAY = 86_400


class Dispatcher:
    """Feeds the executor from the queue, and the queue from the executor."""

    def __init__(
        self,
        store: DispatchStore,
        executor: BurstableExecutor,
        *,
        publish: Callable[[Sequence[Event]], None],
        operations: dict[str, str],
        paths: Paths,
        settings: Settings,
    ) -> None:
        """`operations` maps an operation's name to the dotted name that the worker imports."""
        self._store = store
        self._executor = executor
        self._publish = publish
        self._operations = operations
        self._paths = paths
        self._settings = settings
        self._inbox: deque[ExecutorEvent] = deque()
        self._called_off: set[str] = set()
        self._pending = dict.fromkeys(CLAIM_ORDER, True)
        self._wake = threading.Event()
        self._stopping = False
        self._collect_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Begin to claim."""
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; what still runs stays RUNNING for the next daemon."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def submitted(self, schedule: Schedule) -> None:
        """A request was inserted (any thread)."""
        self._pending[schedule] = True
        self._wake.set()

    def deliver(self, event: ExecutorEvent) -> None:
        """The executor reports something (its supervisor thread)."""
        self._inbox.append(event)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End a request that has been claimed, wherever it is by now (any thread)."""
        # Noted before it is looked for: between claim and submit the executor does not know it
        # yet, and `_submit` looks here right after.
        self._called_off.add(request_id)
        if self._executor.cancel(request_id):
            self._called_off.discard(request_id)

    def _run(self) -> None:
        self._wake.set()  # what an earlier daemon left pending
        while self._await_work():
            try:
                self._turn()
            except DatabaseError as exc:
                log.error("the queue cannot be written, trying again: %s", exc)
                time.sleep(RETRY_SECONDS)
                self._wake.set()

    def _await_work(self) -> bool:
        self._wake.wait(timeout=max(0.0, self._collect_at - time.monotonic()))
        self._wake.clear()
        return not self._stopping

    def _turn(self) -> None:
        self._record()
        for schedule in CLAIM_ORDER:
            self._fill(schedule)
        self._collect()

    # Recording what happened.

    def _record(self) -> None:
        batch = list(self._inbox)
        if batch:
            self._publish(self._write(batch))
        for _ in batch:
            self._inbox.popleft()  # only now: a failed write leaves them for the next turn

    def _write(self, batch: list[ExecutorEvent]) -> list[Event]:
        started = [e for e in batch if isinstance(e, Started)]
        progressed = [e for e in batch if isinstance(e, Progressed)]
        finals = [e for e in batch if isinstance(e, Succeeded | Raised | Died | Cancelled)]
        self._called_off.difference_update(e.task_id for e in finals)
        return self._store.record(
            started=[(e.task_id, e.worker, e.pid, e.pid_started_at, e.at) for e in started],
            progress=[(e.task_id, e.data, e.at) for e in progressed],
            outcomes=[outcome_of(e) for e in finals],
        )

    # Claiming what may run.

    def _fill(self, schedule: Schedule) -> None:
        while self._pending[schedule] and (room := self._executor.room(schedule)) > 0:
            limit = min(room, MAX_CLAIM)
            self._pending[schedule] = False  # before the claim: an insert meanwhile sets it again
            claim = self._store.claim(schedule, limit, time.time())
            if len(claim.requests) == limit:
                self._pending[schedule] = True
            self._publish(claim.events)
            self._submit(schedule, claim.requests)

    def _submit(self, schedule: Schedule, requests: Sequence[Request]) -> None:
        for position, request in enumerate(requests):
            try:
                self._executor.submit(self._task(request))
            except NoRoom:
                self._publish(self._store.release([r.id for r in requests[position:]], time.time()))
                self._pending[schedule] = True
                return
            if request.id in self._called_off:
                self.cancel(request.id)

    def _task(self, request: Request) -> Task:
        return Task(
            id=request.id,
            operation=self._operations[request.operation],
            payload=request.payload,
            schedule=request.schedule,
            log_path=str(self._paths.request_log(request.id)),
            label=label_of(request),
            timeout_seconds=request.timeout_seconds,
        )

    # Collecting what is old.

    def _collect(self) -> None:
        if time.monotonic() < self._collect_at:
            return
        self._collect_at = time.monotonic() + COLLECT_EVERY_SECONDS
        keep_seconds = self._settings.keep_days * SECONDS_PER_DAY
        removed = self._store.collect(time.time(), self._settings.keep_requests, keep_seconds)
        for request_id in removed:
            self._paths.request_log(request_id).unlink(missing_ok=True)
        for name in self._store.collect_environments(time.time(), keep_seconds):
            shutil.rmtree(self._paths.environment_logs / name, ignore_errors=True)


def label_of(request: Request) -> str:
    """For people: `launch trial`."""
    return f"{request.operation} {request.environment or ''}".rstrip()
