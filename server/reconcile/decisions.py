# SPDX-License-Identifier: Apache-2.0
"""The reconciler's decisions: what is due for an environment, and its state. Pure.

    environment, its launch, its latest `down` ──▶ next_step ──▶ what `reconciler.py` does
    its replicas ──▶ observed_state ──▶ the environment's state, once its launch has succeeded

When a replica is started again is decided in `environments/replica_policy.py`.
"""

from __future__ import annotations

from enum import Enum

from ...schema.states import SERVING, EnvironmentState, ReplicaState, RequestState

# The operations after whose requests something may be due; a `probe` changes nothing.
DECISIVE = frozenset({"launch", "down", "scale", "restart"})


_WELL = (ReplicaState.READY, ReplicaState.ASLEEP)


class Step(Enum):
    """The next step for an environment."""

    NOTHING = "nothing"
    QUEUED = "queued"  # its launch waits (again)
    STARTING = "starting"  # its launch runs
    SERVE = "serve"  # its launch succeeded: adopt its replicas, observe them
    ABANDON = "abandon"  # its launch failed: stop what it left, say why
    CANCEL = "cancel"  # its launch was cancelled: stop what it left
    SWEEP = "sweep"  # its launch ended after the environment: stop what the launch left
    RELINQUISH = "relinquish"  # it is being taken down: start nothing again
    RETIRE = "retire"  # it was taken down: stop what the `down` left, even if it failed


_STEP_OF_LAUNCH = {
    RequestState.PENDING: Step.QUEUED,
    RequestState.RUNNING: Step.STARTING,
    RequestState.SUCCEEDED: Step.SERVE,
    RequestState.FAILED: Step.ABANDON,
    RequestState.CANCELLED: Step.CANCEL,
}


def next_step(
    state: EnvironmentState, launch: RequestState | None, down: RequestState | None
) -> Step:
    """Return the next step, from the states of an environment, its launch and latest `down`."""
    if state is EnvironmentState.STOPPED and launch is not None and launch.is_final:
        return Step.SWEEP
    if not state.is_live:
        return Step.NOTHING
    if state is EnvironmentState.STOPPING and down is not None:
        return Step.RETIRE if down.is_final else Step.RELINQUISH
    if launch is None or state in SERVING:  # an update serves before its launch has ended
        return Step.SERVE
    return _STEP_OF_LAUNCH[launch]


def observed_state(replicas: list[ReplicaState], *, is_in_doubt: bool = False) -> EnvironmentState:
    """Return the state of an environment whose launch succeeded, from the states of its replicas.

    Draining replicas do not count; if there are no others, their replacements have not been seen
    yet. `is_in_doubt`: a run file was set aside, so that the state of its replica is not known; or
    there is no replica while a request replaces them.
    """
    if is_in_doubt:
        return EnvironmentState.DEGRADED
    is_any_drained = ReplicaState.DRAINING in replicas
    replicas = [state for state in replicas if state is not ReplicaState.DRAINING]
    if is_any_drained and not replicas:
        return EnvironmentState.DEGRADED
    if replicas and all(state is ReplicaState.ASLEEP for state in replicas):
        return EnvironmentState.ASLEEP
    if replicas and all(state in _WELL for state in replicas):
        return EnvironmentState.READY
    if all(state in (ReplicaState.FAILED, ReplicaState.STOPPED) for state in replicas):
        return EnvironmentState.FAILED
    return EnvironmentState.DEGRADED
