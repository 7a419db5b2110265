# SPDX-License-Identifier: Apache-2.0
"""The state that the dispatcher's parts share: the requests that run, and their tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...executor.executor import BurstableExecutor
from ...requests_db.connections import WriteConnection
from ...requests_db.records import Event, Request
from ...requests_db.sql.rows import QueueClock
from ...schema.settings import Paths, Settings
from ...schema.states import Schedule
from ...system.net.access import without_token
from .daemon_tasks import DaemonTasks
from .memory_estimates import MemoryEstimates
from .request_traces import RequestTraces


class RunningRequests(dict[str, Request]):
    """Requests that were claimed and have not ended, by id; and the ids of the LONG ones."""

    def __init__(self) -> None:
        super().__init__()
        self.long: set[str] = set()

    def add(self, request: Request) -> None:
        """Count the request as running."""
        self[request.id] = request
        if request.schedule is Schedule.LONG:
            self.long.add(request.id)

    def remove(self, request_id: str) -> Request | None:
        """Remove and return the request; None when it was not running here."""
        self.long.discard(request_id)
        return self.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class Timing:
    """The intervals of what the dispatcher does without an event, in seconds."""

    retry_seconds: float = 1.0  # after the database refused a write
    # Between looks at memory while a request waits for it: other processes free memory, too.
    look_seconds: float = 0.5
    least_look_seconds: float = 0.01  # the same, when requests end meanwhile
    # A request's worker is written with the outcome, or this long after the start if it still runs:
    # most SHORT requests have ended by then, and a transaction is a third of their cost.
    started_seconds: float = 0.05
    learned_seconds: float = 1.0  # between writes of memory estimates, unless a worker died
    bound_logs_seconds: float = 2.0
    collect_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """The objects that the dispatcher's parts share; used on its thread alone."""

    store: WriteConnection
    executor: BurstableExecutor  # must call `Dispatcher.deliver` with its events
    publish: Callable[[Sequence[Event]], None]  # called with the events of each transaction
    operations: Mapping[str, str]  # from a name to what the worker imports; empty: no worker
    paths: Paths
    settings: Settings
    estimates: MemoryEstimates = field(default_factory=MemoryEstimates)
    budget_bytes: int = 2**62  # what all workers together may use, the most a retry is given
    clock: QueueClock = field(default_factory=QueueClock)
    timing: Timing = Timing()
    running: RunningRequests = field(default_factory=RunningRequests)
    traces: RequestTraces | None = None  # where traces are on
    tasks: DaemonTasks | None = None  # the requests that the daemon itself carries out


def log_fields(request: Request, **more: object) -> dict[str, object]:
    """The structured fields of a log record about a request, for `extra=`."""
    fields = {"request_id": request.id, "operation": request.operation}
    if request.environment is not None:
        fields["environment"] = without_token(request.environment)[0]
    return {**fields, **more}
