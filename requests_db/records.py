# SPDX-License-Identifier: Apache-2.0
"""The rows of the tables, and the answers of transactions, as frozen values that may cross threads.

Times are seconds since the epoch, for people: a wall clock may step, so nothing is decided by them.
Durations are seconds, sizes bytes.

The `events` of an answer are rows already written, ready to be published.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..schema import states
from ..system.net.access import without_token
from ..system.text.json_lines import Json


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request before it is written."""

    operation: str
    schedule: states.Schedule
    payload: Json
    environment: str | None = None  # the environment's name, when the request is about one
    priority: int = 0  # higher runs earlier
    idempotency_key: str | None = None
    max_attempts: int = 1
    timeout_seconds: float | None = None
    retry_oom: bool = False  # run again with more memory after a kill for memory
    traceparent: str | None = None  # the trace that it is part of, as W3C spells it


@dataclass(frozen=True, slots=True)
class RequestError:
    """The reason why a request failed, as it is stored, shown and sent."""

    kind: states.ErrorKind
    message: str  # what happened, in one line
    hint: str | None = None  # what to do next
    evidence: Json | None = None  # an `ExitReason` as JSON, for deaths
    log_tail: tuple[str, ...] = ()  # the last lines of the log, for deaths and tracebacks


# Not frozen: the dispatcher makes one for each request, and freezing it costs eight times as much.
@dataclass(slots=True)
class Request:
    """One row of `requests`."""

    id: str
    operation: str
    schedule: states.Schedule
    payload: Json
    state: states.RequestState
    created_at: float
    environment: str | None = None
    priority: int = 0
    idempotency_key: str | None = None
    attempts: int = 0
    max_attempts: int = 1
    timeout_seconds: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    cancel_requested_at: float | None = None
    worker: str | None = None  # the worker's name: `long-3`
    worker_pid: int | None = None
    worker_started_at: float | None = None  # with the pid, the worker process's identity
    peak_bytes: int | None = None
    result: Any = None
    error: RequestError | None = None
    seq: int = 0  # the order of arrival
    retry_oom: bool = False
    memory_bytes: int | None = None  # for the next attempt, after one was killed for memory
    rank: float = 0.0  # its place in the queue, smallest first
    lost_daemons: int = 0  # how often it was requeued because the daemon was lost
    traceparent: str | None = None


def label_of(request: Request | NewRequest) -> str:
    """Name a request for people: `launch trial`."""
    return f"{request.operation} {without_token(request.environment or '')[0]}".rstrip()


@dataclass(frozen=True, slots=True)
class Environment:
    """One row of `environments`: what is wanted (`spec`) and what is observed."""

    name: str
    spec: Json  # an `environments.EnvironmentSpec` as JSON
    state: states.EnvironmentState
    created_at: float
    updated_at: float
    request_id: str | None = None  # the launch that made it
    address: str | None = None  # what goes into upstream's `base_url`
    error: RequestError | None = None
    generation: int = 1  # the number of the generation that `request_id` launched


@dataclass(frozen=True, slots=True)
class Generation:
    """One row of `generations`: what one launch of an environment asked for, and its state."""

    environment: str
    number: int  # from 1, for as long as the environment is known
    request_id: str  # the launch
    spec: Json  # of the launch, without secrets
    state: states.GenerationState
    created_at: float
    served_at: float | None = None
    ended_at: float | None = None
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True)
class Replica:
    """One row of `replicas`."""

    id: str  # `<environment>-<ordinal>-…-<launch id>`: names its run directory too
    environment: str
    ordinal: int
    provider: str
    state: states.ReplicaState
    run_dir: str
    started_at: float
    pid: int | None = None
    restarts: int = 0
    exit: Json | None = None  # the last `ExitReason` as JSON


def launch_of(replica_id: str) -> str:
    """Return the launch that a replica belongs to."""
    return replica_id.rpartition("-")[2]


# Not frozen: the dispatcher makes one for each request, and freezing it costs eight times as much.
@dataclass(slots=True)
class Event:
    """One row of the append-only event log; `seq` is strictly increasing."""

    seq: int
    at: float
    kind: str  # `request.state`, `environment.state`, … (`journal.py`)
    request_id: str | None = None
    environment: str | None = None
    data: Json = field(default_factory=dict)
    # The request in its new state: not stored, but saves subscribers a query.
    request: Request | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one running request; written in one guarded update."""

    request_id: str
    state: states.RequestState  # SUCCEEDED, FAILED or CANCELLED
    finished_at: float
    result: Any = None
    error: RequestError | None = None
    peak_bytes: int | None = None


RETRYING = "retrying"  # the `phase` of the progress that announces a retry


@dataclass(frozen=True, slots=True)
class Retry:
    """A running request that was killed for memory, and goes back to the queue."""

    request_id: str
    at: float
    memory_bytes: int  # for its next attempt
    message: str  # for people: what happened, and what comes next
    error: Json | None = None  # how the attempt ended, like a failed request's, without secrets


@dataclass(frozen=True, slots=True)
class PeakSample:
    """The most memory that one run used. Sizes in bytes."""

    at: float
    peak_bytes: int
    killed: bool = False  # for memory: it would have used more


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """One row of `expectations`: the latest samples of an operation's memory, oldest first."""

    operation: str
    source: str
    samples: tuple[PeakSample, ...]
    updated_at: float


Events = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is written, and durable."""

    request: Request
    events: Events
    # Running launches that were cancelled: their workers have yet to be ended.
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The same request came with this idempotency key before; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class KeyReused:
    """Another request came with this idempotency key before; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class NameTaken:
    """A live environment has the name; nothing was written."""

    environment: Environment


@dataclass(frozen=True, slots=True)
class OtherSource:
    """An environment of the name runs from another source, and an update was not asked for."""

    environment: Environment


@dataclass(frozen=True, slots=True)
class BeingUpdated:
    """An environment of the name is being updated already; nothing was written."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The queue of its schedule is full; nothing was written."""

    pending: int


@dataclass(frozen=True, slots=True)
class CannotChange:
    """The environment does not serve, or a request is changing it; nothing was written."""

    environment: Environment
    change: Request | None = None


Impossible = KeyReused | NameTaken | OtherSource | BeingUpdated | QueueFull
Refusal = CannotChange | Duplicate | Impossible
SubmitResult = Submitted | Refusal


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The outcome of cancelling a request.

    A PENDING request is now cancelled; a RUNNING one is marked, and its worker has yet to be ended;
    for one that had ended, nothing was written.
    """

    request: Request
    before: states.RequestState
    events: Events = ()

    @property
    def is_under_way(self) -> bool:
        """Return whether it runs: it may still end in another way."""
        return self.before is states.RequestState.RUNNING


@dataclass(frozen=True, slots=True)
class Claim:
    """Requests that are RUNNING now, in the order in which to start them."""

    requests: tuple[Request, ...]
    events: Events
