# SPDX-License-Identifier: Apache-2.0
"""The states of requests, environments, generations and replicas, and their transitions.

Light, to import anywhere.

    PENDING ──dispatcher──▶ RUNNING ──supervisor──▶ SUCCEEDED | FAILED | CANCELLED
       │  ▲                    │
       │  └── recovery, retry ─┘  (after a lost daemon, up to ten; or killed for memory with
       │                            --retry-oom, which is counted against max_attempts)
       └── API (cancel) ──▶ CANCELLED

The tables below alone decide which transition is allowed. The statements repeat each rule as their
guard (`WHERE state = …`), so that the database refuses what these refuse; a test walks the whole
product of states and compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class InvalidTransition(Exception):
    """The requested state does not follow from the present one."""

    def __init__(self, subject: str, before: str, after: str) -> None:
        super().__init__(f"{subject} cannot go from {before} to {after}")


class RequestState(StrEnum):
    """The state of a request."""

    PENDING = "PENDING"  # written, waiting for a worker; the dispatcher moves it on
    RUNNING = "RUNNING"  # claimed for a worker; its outcome or its death moves it on
    SUCCEEDED = "SUCCEEDED"  # final: the operation returned
    FAILED = "FAILED"  # final: the operation raised, or its worker died; `error` says which
    CANCELLED = "CANCELLED"  # final: cancelled before it finished

    @property
    def is_final(self) -> bool:
        """Return whether the state never changes again."""
        return self in FINAL_STATES


FINAL_STATES = frozenset({RequestState.SUCCEEDED, RequestState.FAILED, RequestState.CANCELLED})


class Schedule(StrEnum):
    """The workers that may run a request."""

    LONG = "LONG"
    SHORT = "SHORT"


class ErrorKind(StrEnum):
    """The reason why a request failed."""

    OPERATION_ERROR = "operation_error"  # the operation raised
    OOM_KILLED = "oom_killed"  # its worker, or a process below it, ran out of memory
    WORKER_LOST = "worker_lost"  # its worker died of anything else, or the daemon was lost
    TIMED_OUT = "timed_out"  # it ran past its time-out
    INVALID = "invalid"  # it can never work as asked: unknown source, broken manifest, …


# Shown in place of READY while no session can begin, since the constructor raises. Never stored.
FAILING = "FAILING"


class EnvironmentState(StrEnum):
    """The state of an environment, observed by the reconciler."""

    PENDING = "PENDING"  # its launch request waits in the queue
    STARTING = "STARTING"  # its launch request runs: prepared, started, not yet ready
    READY = "READY"  # every wanted replica answers
    DEGRADED = "DEGRADED"  # some replica is down and will be restarted
    ASLEEP = "ASLEEP"  # it is not used, so no server runs; a client that connects wakes it
    FAILED = "FAILED"  # the launch failed, or the restart budget is spent; `error` says why
    STOPPING = "STOPPING"  # a `down` is under way
    STOPPED = "STOPPED"  # taken down; kept so that its logs can still be found by name

    @property
    def is_live(self) -> bool:
        """Return whether the environment's name is taken."""
        return self not in {EnvironmentState.FAILED, EnvironmentState.STOPPED}


class GenerationState(StrEnum):
    """The state of one generation of an environment: what one launch of it started."""

    STARTING = "STARTING"  # its launch waits or runs
    SERVING = "SERVING"  # sessions connect to it
    DRAINING = "DRAINING"  # a newer one serves; its sessions end as they will
    RETIRED = "RETIRED"  # nothing of it runs: a newer one serves, or it was taken down
    FAILED = "FAILED"  # it was not ready, or its restart budget is spent; `error` says why


class ReplicaState(StrEnum):
    """The state of one replica, observed by the reconciler."""

    STARTING = "STARTING"
    READY = "READY"
    ASLEEP = "ASLEEP"  # its server ended unused; one starts for a client that connects
    DRAINING = "DRAINING"  # its sessions go on and none begins; it is stopped when they have ended
    BACKING_OFF = "BACKING_OFF"  # it died and will be started again after a pause
    FAILED = "FAILED"  # it died and its restart budget is spent
    STOPPED = "STOPPED"


REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.PENDING: frozenset({RequestState.RUNNING, RequestState.CANCELLED}),
    # PENDING: released before it began, requeued or retried.
    RequestState.RUNNING: FINAL_STATES | {RequestState.PENDING},
    **dict.fromkeys(FINAL_STATES, frozenset()),
}

# States in which an environment takes sessions, even if the first one has to wait.
SERVING = frozenset({EnvironmentState.READY, EnvironmentState.DEGRADED, EnvironmentState.ASLEEP})

_OBSERVED = SERVING | {EnvironmentState.FAILED}
_ENDS = frozenset({EnvironmentState.STOPPING, EnvironmentState.STOPPED})

# A name that is taken again by a new launch is a new row, not a transition of the old one.
ENVIRONMENT_TRANSITIONS: Mapping[EnvironmentState, frozenset[EnvironmentState]] = {
    EnvironmentState.PENDING: _OBSERVED | _ENDS | {EnvironmentState.STARTING},
    # Back to PENDING: its launch was queued again after a lost daemon.
    EnvironmentState.STARTING: _OBSERVED | _ENDS | {EnvironmentState.PENDING},
    EnvironmentState.READY: _OBSERVED - {EnvironmentState.READY} | _ENDS,
    EnvironmentState.DEGRADED: _OBSERVED - {EnvironmentState.DEGRADED} | _ENDS,
    EnvironmentState.ASLEEP: _OBSERVED - {EnvironmentState.ASLEEP} | _ENDS,
    EnvironmentState.FAILED: _ENDS,
    # A late observation of its replicas must not revive a stopping environment.
    EnvironmentState.STOPPING: frozenset({EnvironmentState.STOPPED, EnvironmentState.FAILED}),
    EnvironmentState.STOPPED: frozenset(),
}


# States of an environment in which a ready generation may take it over.
UPDATABLE = SERVING | {EnvironmentState.FAILED}

_ENDED = frozenset({GenerationState.RETIRED, GenerationState.FAILED})

GENERATION_TRANSITIONS: Mapping[GenerationState, frozenset[GenerationState]] = {
    GenerationState.STARTING: _ENDED | {GenerationState.SERVING},
    GenerationState.SERVING: _ENDED | {GenerationState.DRAINING},
    GenerationState.DRAINING: _ENDED,
    GenerationState.RETIRED: frozenset(),
    GenerationState.FAILED: frozenset(),
}


def check_transition(request_id: str, before: RequestState, after: RequestState) -> None:
    """Raise `InvalidTransition` for a transition of a request that the table does not list."""
    if after not in REQUEST_TRANSITIONS[before]:
        raise InvalidTransition(f"request {request_id}", before.value, after.value)
