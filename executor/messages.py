# SPDX-License-Identifier: Apache-2.0
"""The executor's messages: a `Task` goes in, events come out; and their frames on a worker's pipe.

They have only plain values. The executor knows no HTTP and no SQL: it gets an operation as a
dotted name and a JSON payload, and only the worker imports the operation.

A frame is four bytes of length, then JSON; `worker.py` describes them. A length comes first,
so that a 10 MB result is parsed once, when it is complete.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..system.process.exit_reason import ExitReason
from ..system.text.units import MB
from .errors import FrameError

LONG = "LONG"
SHORT = "SHORT"


# Not frozen: the dispatcher makes one for each request, and freezing it costs eight times as much.
@dataclass(slots=True)
class Task:
    """One request, as the executor needs it."""

    id: str
    operation: str  # `package.module:callable`
    payload: dict[str, Any]
    schedule: str  # LONG or SHORT
    log_path: str  # the worker's stdout and stderr are appended here
    label: str = ""  # for people: `launch trial`
    timeout_seconds: float | None = None
    memory_bytes: int | None = None  # the requested cap; None means the plan's
    expected_bytes: int = 0  # the memory that it should need, by which it is admitted
    traceparent: str | None = None  # of its span, if traces are on


@dataclass(frozen=True, slots=True)
class TaskError:
    """The exception that an operation raised, as plain values instead of a pickle."""

    type: str  # the exception's qualified name
    message: str
    hint: str | None = None
    kind: str = "operation_error"  # `invalid` for some errors, such as `environments.errors`
    traceback: str = ""
    evidence: dict[str, Any] | None = None  # the exit that failed it: an `ExitReason`'s JSON


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


ExecutorEvent = Started | Progressed | Succeeded | Raised | Died | Cancelled
EventSink = Callable[[ExecutorEvent], None]  # on the supervisor thread; must return at once


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, for `openenv info` and the metrics."""

    name: str
    schedule: str
    pid: int
    guaranteed: bool
    task_id: str | None = None
    label: str = ""
    cap_bytes: int | None = None  # of its task, or else of the plan; None: no cap
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


_LENGTH = struct.Struct("<I")

# Beyond this a result is a file, not a message; the daemon must hold it in memory.
MAX_FRAME_BYTES = 256 * MB
MAX_RESULT_BYTES = MAX_FRAME_BYTES - MB  # leaves room for the rest of the message


def encode_frame(message: Any) -> bytes:
    """Encode `message` as one frame.

    Raises:
        TypeError: it is not JSON.
        FrameError: it is larger than `MAX_FRAME_BYTES`.
    """
    if len(body := orjson.dumps(message)) > MAX_FRAME_BYTES:
        size, most = len(body) / MB, MAX_FRAME_BYTES // MB
        raise FrameError(f"{size:,.0f} MB of JSON are too much for a pipe, which takes {most} MB")
    return _LENGTH.pack(len(body)) + body


def encode_result(result: Any) -> orjson.Fragment:
    """Encode `result` once, to be put into a message as it is.

    Raises:
        TypeError: it is not JSON.
        FrameError: it is larger than `MAX_RESULT_BYTES`.
    """
    try:
        body = orjson.dumps(result)
    except TypeError as exc:
        raise TypeError(f"the operation's result is not JSON: {exc}") from exc
    if len(body) > MAX_RESULT_BYTES:
        size, most = len(body) / MB, MAX_RESULT_BYTES // MB
        raise FrameError(f"the result is {size:,.0f} MB of JSON; {most} MB can be returned")
    return orjson.Fragment(body)


class FrameReader:
    """Splits the bytes of a pipe into frames, however they arrive."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the frames that `data` completed.

        Raises `FrameError`: the other end sent something else.
        """
        buffer, frames = self._buffer, []
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes was announced")
            end = _LENGTH.size + length
            if len(buffer) < end:
                break
            body = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]
            try:
                frames.append(orjson.loads(body))
            except orjson.JSONDecodeError as exc:
                raise FrameError("a frame held no JSON") from exc
        return frames
