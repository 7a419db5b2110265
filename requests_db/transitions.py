# SPDX-License-Identifier: Apache-2.0
"""The transitions that are allowed: the only place that decides it.

The statements repeat each rule as their guard (`WHERE state = …`), so that the database refuses
what this table refuses; a test walks the whole product of states and compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import InvalidTransition
from .states import EnvironmentState, GenerationState, RequestState

REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.PENDING: frozenset({RequestState.RUNNING, RequestState.CANCELLED}),
    RequestState.RUNNING: frozenset(
        {
            RequestState.PENDING,  # released before it began, requeued or retried
            RequestState.SUCCEEDED,
            RequestState.FAILED,
            RequestState.CANCELLED,
        }
    ),
    RequestState.SUCCEEDED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}

# In which of its states an environment takes sessions, of which its first may have to wait.
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


# In which of its states a generation that is ready may take an environment over.
UPDATABLE = SERVING | {EnvironmentState.FAILED}

_ENDED = frozenset({GenerationState.RETIRED, GenerationState.FAILED})

GENERATION_TRANSITIONS: Mapping[GenerationState, frozenset[GenerationState]] = {
    GenerationState.STARTING: _ENDED | {GenerationState.SERVING},
    GenerationState.SERVING: _ENDED | {GenerationState.DRAINING},
    GenerationState.DRAINING: _ENDED,
    GenerationState.RETIRED: frozenset(),
    GenerationState.FAILED: frozenset(),
}


def may_follow_generation(before: GenerationState, after: GenerationState) -> bool:
    """Whether a generation may go from `before` to `after`."""
    return after in GENERATION_TRANSITIONS[before]


def may_follow(before: EnvironmentState, after: EnvironmentState) -> bool:
    """Whether an environment may go from `before` to `after`."""
    return after in ENVIRONMENT_TRANSITIONS[before]


def check_transition(request_id: str, before: RequestState, after: RequestState) -> None:
    """Refuse a transition of a request that the table does not list.

    Raises:
        InvalidTransition: the table does not list it.
    """
    if after not in REQUEST_TRANSITIONS[before]:
        raise InvalidTransition(f"request {request_id}", before.value, after.value)
