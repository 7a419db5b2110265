# SPDX-License-Identifier: Apache-2.0
"""The executor's messages: a `Task` goes in, events come out.

Plain values alone. The executor knows no HTTP and no SQL: an operation reaches it as a dotted
name and a JSON payload, and only the worker imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ..system.process.exit_reason import ExitReason

LONG = "LONG"
SHORT = "SHORT"


@dataclass(frozen=True, slots=True)
class Task:
    """One request, as the executor needs it."""

    id: str
    operation: str  # `package.module:callable`
    payload: dict[str, Any]
    schedule: str  # LONG or SHORT
    log_path: str  # the worker's stdout and stderr are appended here
    label: str = ""  # for people: `launch trial`
    timeout_seconds: float | None = None
    memory_bytes: int | None = None  # the cap asked for; None means the plan's
    expected_bytes: int = 0  # what it is expected to need; admission counts with it
    traceparent: str | None = None  # the span that it is, where traces are on


@dataclass(frozen=True, slots=True)
class TaskError:
    """What an operation raised, as plain values instead of a pickle."""

    type: str  # the exception's qualified name
    message: str
    hint: str | None = None
    kind: str = "operation_error"  # an operation may say `invalid` (as `environments.errors` do)
    traceback: str = ""
    evidence: dict[str, Any] | None = None  # of an exit that failed it, as an `ExitReason`'s JSON


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has the task."""

    task_id: str
    worker: str
    pid: int
    pid_started_at: float
    at: float


@dataclass(frozen=True, slots=True)
class Progressed:
    """The operation reported progress."""

    task_id: str
    data: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The operation returned `result` (JSON)."""

    task_id: str
    result: Any
    peak_bytes: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Raised:
    """The operation raised; the worker continues."""

    task_id: str
    error: TaskError
    peak_bytes: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Died:
    """The worker exited while it ran the task; `exit` says how."""

    task_id: str
    worker: str
    exit: ExitReason
    log_tail: tuple[str, ...]
    peak_bytes: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task was cancelled through `BurstableExecutor.cancel` and did not finish."""

    task_id: str
    at: float


@dataclass(frozen=True, slots=True)
class RoomFreed:
    """A worker became free: the dispatcher may claim again."""

    schedule: str


ExecutorEvent = Started | Progressed | Succeeded | Raised | Died | Cancelled | RoomFreed


class EventSink(Protocol):
    """Receives events."""

    def __call__(self, event: ExecutorEvent, /) -> None:
        """Take an event, on the supervisor thread; must return at once."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, for `openenv info` and the metrics."""

    name: str
    schedule: str
    pid: int
    guaranteed: bool
    task_id: str | None = None
    label: str = ""
    cap_bytes: int | None = None  # of what it runs, or of the plan; None: no cap
    rss_bytes: int | None = None
    tasks_run: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """The executor's workers, plan and free memory."""

    workers: list[WorkerStatus] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    free_burst_bytes: int = 0  # by what tasks are expected to need
    available_bytes: int = 0  # by what the machine has left, less the reserve
    zygote_pid: int | None = None
