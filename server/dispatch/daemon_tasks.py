# SPDX-License-Identifier: Apache-2.0
"""`DaemonTasks`: the requests that the daemon carries out itself, each as a task on its loop.

    Claimer ────────────begin()──▶ task: carry_out(request, context, prepared)
       └────────────────cancel()──▶   │ Progressed …, then Succeeded | Raised | Cancelled
    Dispatcher, when a worker         └──deliver()──▶ Recorder
    has prepared it ────begin()──▶

Some requests need no worker; for others a worker prepares what the daemon then starts.

They report with the executor's events, so that what follows is the same for all requests. When the
daemon stops, nothing is reported: the request is left RUNNING, and the next daemon queues it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ...executor.messages import Cancelled, ExecutorEvent, Progressed, Raised, Succeeded, TaskError
from ...executor.worker import describe_error
from ...requests_db.records import Request
from ...schema.settings import Paths
from ...schema.states import ErrorKind
from ..operations.base import OperationContext

STOPPING = "the daemon stops"  # the argument of the `CancelledError` that ends a task then
CarryOut = Callable[[Request, OperationContext, Any], Coroutine[Any, Any, Any]]


@dataclass(eq=False)
class DaemonTasks:
    """Owns the tasks. `begin` and `cancel` may be called from any thread."""

    loop: asyncio.AbstractEventLoop
    paths: Paths
    deliver: Callable[[ExecutorEvent], None]
    carry_out: CarryOut
    _known: set[str] = field(init=False, default_factory=set)  # ids
    _tasks: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)  # by id
    _is_stopping: bool = field(init=False, default=False)

    def begin(self, request: Request, prepared: Any = None, peak_bytes: int = 0) -> None:
        """Carry out a request that has been claimed.

        If a worker ran before, it returned `prepared`, and needed `peak_bytes`.
        """
        self._known.add(request.id)
        self.loop.call_soon_threadsafe(self._begin, request, prepared, peak_bytes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when it is not carried out here."""
        if request_id not in self._known:
            return False
        self.loop.call_soon_threadsafe(self._cancel, request_id)
        return True

    async def stop(self) -> None:
        """End all tasks; their requests stay RUNNING."""
        self._is_stopping = True
        tasks = list(self._tasks.values())
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
        try:
            event = await self._event_of(request, prepared, peak_bytes)
        finally:
            self._known.discard(request.id)
            del self._tasks[request.id]
        if event is not None:
            self.deliver(event)

    async def _event_of(
        self, request: Request, prepared: Any, peak_bytes: int
    ) -> ExecutorEvent | None:
        left = request.timeout_seconds
        if left is not None and request.started_at is not None:
            left = max(0.0, left - (time.time() - request.started_at))
        timeout = asyncio.timeout(left)
        try:
            async with timeout:
                result = await self.carry_out(request, self._context_of(request.id), prepared)
        except asyncio.CancelledError:
            return None if self._is_stopping else Cancelled(request.id, time.time())
        except Exception as exc:
            evidence = getattr(exc, "evidence", None)
            described = describe_error(exc, self.paths.home) | {"evidence": evidence}
            if timeout.expired():
                described["message"] = f"it had not ended after {request.timeout_seconds:g} s"
                described["hint"] = "allow more time with --set timeout=DURATION"
                described["kind"] = ErrorKind.TIMED_OUT
            error = TaskError(**described)
            return Raised(request.id, error, None, time.time())
        return Succeeded(request.id, result, peak_bytes, time.time())

    def _context_of(self, request_id: str) -> OperationContext:
        def progress(data: dict[str, Any]) -> None:
            self.deliver(Progressed(request_id, data, time.time()))

        def say(text: str) -> None:
            # The error: a full disk.
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
                log.write(f"{text}\n")

        path = self.paths.request_log(request_id)
        return OperationContext(request_id, self.paths.home, progress, say)
