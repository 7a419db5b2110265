# SPDX-License-Identifier: Apache-2.0
"""The requests that run: those that were claimed, and `DaemonTasks`; the tools of both.

Some requests need no worker; for others a worker prepares what the daemon then starts. The daemon
carries these out itself, each as a task on its loop:

    Claimer ────────────begin()──▶ task: carry_out(request, context, prepared)
       └────────────────cancel()──▶   │ Progressed …, then Succeeded | Raised | Cancelled
    Dispatcher, when a worker         └──deliver()──▶ Recorder
    has prepared it ────begin()──▶

They report with the executor's events, so that what follows is the same for all requests. When the
daemon stops, nothing is reported: the request is left RUNNING, and the next daemon queues it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...executor.executor import BurstableExecutor
from ...executor.messages import Cancelled, ExecutorEvent, Progressed, Raised, Succeeded, TaskError
from ...executor.worker import describe_error
from ...requests_db.connections import WriteConnection
from ...requests_db.records import Event, Request
from ...requests_db.sql.rows import QueueClock
from ...schema.settings import Paths, Settings
from ...schema.states import ErrorKind, Schedule
from ...system.net.access import without_token
from ..operations.base import OperationContext
from .memory_estimates import MemoryEstimates
from .request_traces import RequestTraces

STOPPING = "the daemon stops"  # the argument of the `CancelledError` that ends a task then
CarryOut = Callable[[Request, OperationContext, Any], Coroutine[Any, Any, Any]]


@dataclass(eq=False)
class DaemonTasks:
    """Owns the tasks. `begin` and `cancel` may be called from any thread."""

    loop: asyncio.AbstractEventLoop
    paths: Paths
    deliver: Callable[[ExecutorEvent], None]
    carry_out: CarryOut
    # By id; None before the task has begun on the loop.
    _tasks: dict[str, asyncio.Task[None] | None] = field(init=False, default_factory=dict)
    _is_stopping: bool = field(init=False, default=False)

    def begin(self, request: Request, prepared: Any = None, peak_bytes: int = 0) -> None:
        """Carry out a claimed request, with what a worker has prepared, and the peak of that."""
        self._tasks[request.id] = None
        self.loop.call_soon_threadsafe(self._begin, request, prepared, peak_bytes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when it is not carried out here."""
        if request_id not in self._tasks:
            return False
        self.loop.call_soon_threadsafe(self._cancel, request_id)
        return True

    async def stop(self) -> None:
        """End all tasks; their requests stay RUNNING."""
        self._is_stopping = True
        tasks = [task for task in self._tasks.values() if task is not None]
        for task in tasks:
            task.cancel(STOPPING)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, request: Request, prepared: Any, peak_bytes: int) -> None:
        if not self._is_stopping:
            name = f"{request.operation} {request.environment}"
            self._tasks[request.id] = self.loop.create_task(
                self._run(request, prepared, peak_bytes), name=name
            )

    def _cancel(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def _run(self, request: Request, prepared: Any, peak_bytes: int) -> None:
        event: ExecutorEvent | None
        left = request.timeout_seconds
        if left is not None and request.started_at is not None:
            left = max(0.0, left - (time.time() - request.started_at))
        timeout = asyncio.timeout(left)
        try:
            async with timeout:
                result = await self.carry_out(request, self._context_of(request.id), prepared)
            event = Succeeded(request.id, result, peak_bytes, time.time())
        except asyncio.CancelledError:
            event = None if self._is_stopping else Cancelled(request.id, time.time())
        except Exception as exc:
            evidence = getattr(exc, "evidence", None)
            described = describe_error(exc, self.paths.home) | {"evidence": evidence}
            if timeout.expired():
                described["message"] = f"it had not ended after {request.timeout_seconds:g} s"
                described["hint"] = "allow more time with --set timeout=DURATION"
                described["kind"] = ErrorKind.TIMED_OUT
            event = Raised(request.id, TaskError(**described), None, time.time())
        del self._tasks[request.id]
        if event is not None:
            self.deliver(event)

    def _context_of(self, request_id: str) -> OperationContext:
        def progress(data: dict[str, Any]) -> None:
            self.deliver(Progressed(request_id, data, time.time()))

        def say(text: str) -> None:
            # The error: a full disk.
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
                log.write(f"{text}\n")

        path = self.paths.request_log(request_id)
        return OperationContext(request_id, self.paths.home, progress, say)


class RunningRequests(dict[str, Request]):
    """Requests that were claimed and have not ended, by id."""

    @property
    def long(self) -> list[str]:
        """The ids of the LONG ones."""
        return [id_ for id_, request in self.items() if request.schedule is Schedule.LONG]


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
    traces: RequestTraces = field(default_factory=RequestTraces)
    tasks: DaemonTasks | None = None  # the requests that the daemon itself carries out


def log_fields(request: Request, **more: object) -> dict[str, object]:
    """The structured fields of a log record about a request, for `extra=`."""
    fields = {"request_id": request.id, "operation": request.operation}
    if request.environment is not None:
        fields["environment"] = without_token(request.environment)[0]
    return {**fields, **more}
