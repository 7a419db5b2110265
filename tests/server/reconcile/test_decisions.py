# SPDX-License-Identifier: Apache-2.0
"""The reconciler's decisions: plain values in, one step out."""

from __future__ import annotations

from itertools import product

import pytest

from openenvd.schema.states import (
    EnvironmentState,
    GenerationState,
    ReplicaState,
    RequestState,
)
from openenvd.server.reconcile.decisions import (
    Step,
    UpdateStep,
    next_step,
    observed_state,
    update_step,
)

S = EnvironmentState
R = RequestState
U = UpdateStep


@pytest.mark.parametrize(
    ("launch", "step"),
    [
        (R.PENDING, Step.QUEUED),
        (R.RUNNING, Step.STARTING),
        (R.SUCCEEDED, Step.SERVE),
        (R.FAILED, Step.ABANDON),
        (R.CANCELLED, Step.CANCEL),
        (None, Step.SERVE),  # its request has been collected, so it had succeeded
    ],
)
@pytest.mark.parametrize("state", [S.PENDING, S.STARTING, S.READY, S.DEGRADED])
def test_a_live_environment_follows_its_launch(
    state: EnvironmentState, launch: RequestState | None, step: Step
) -> None:
    assert next_step(state, launch, None) is step


@pytest.mark.parametrize(
    ("down", "step"),
    [
        (R.PENDING, Step.RELINQUISH),
        (R.RUNNING, Step.RELINQUISH),
        (R.SUCCEEDED, Step.RETIRE),
        (R.FAILED, Step.RETIRE),
        (R.CANCELLED, Step.RETIRE),
    ],
)
def test_a_stopping_environment_follows_its_down(down: RequestState, step: Step) -> None:
    assert next_step(S.STOPPING, R.SUCCEEDED, down) is step


def test_a_stopping_environment_whose_down_is_not_written_yet_goes_on() -> None:
    assert next_step(S.STOPPING, R.SUCCEEDED, None) is Step.SERVE


@pytest.mark.parametrize(("launch", "down"), list(product([None, *R], [None, *R])))
def test_nothing_is_due_for_an_environment_that_has_failed(
    launch: RequestState | None, down: RequestState | None
) -> None:
    assert next_step(S.FAILED, launch, down) is Step.NOTHING


@pytest.mark.parametrize("launch", list(R))
def test_a_launch_that_ends_after_its_environment_was_taken_down_is_swept_after(
    launch: RequestState,
) -> None:
    assert next_step(S.STOPPED, launch, None) is (Step.SWEEP if launch.is_final else Step.NOTHING)


@pytest.mark.parametrize(
    ("state", "launch", "step"),
    [
        *((state, launch, U.WAIT) for state in S for launch in (R.PENDING, R.RUNNING)),
        *((state, launch, U.ROLL_BACK) for state in S for launch in (R.FAILED, R.CANCELLED, None)),
        (S.READY, R.SUCCEEDED, U.SWITCH),
        (S.DEGRADED, R.SUCCEEDED, U.SWITCH),
        (S.ASLEEP, R.SUCCEEDED, U.SWITCH),
        (S.FAILED, R.SUCCEEDED, U.SWITCH),  # the update mends it
        (S.STOPPING, R.SUCCEEDED, U.ROLL_BACK),
        (S.STOPPED, R.SUCCEEDED, U.ROLL_BACK),
        (S.PENDING, R.SUCCEEDED, U.ROLL_BACK),  # of an environment that had the name before
        (S.STARTING, R.SUCCEEDED, U.ROLL_BACK),
    ],
)
def test_an_update_follows_its_launch(
    state: EnvironmentState, launch: RequestState | None, step: UpdateStep
) -> None:
    assert update_step(state, GenerationState.STARTING, launch) is step


@pytest.mark.parametrize("state", list(S))
def test_an_older_generation_never_takes_over(state: EnvironmentState) -> None:
    step = update_step(state, GenerationState.STARTING, R.SUCCEEDED, is_newer=False)
    assert step is U.ROLL_BACK


@pytest.mark.parametrize(("state", "launch"), list(product(S, [None, *R])))
def test_what_was_replaced_drains_and_what_has_ended_is_left(
    state: EnvironmentState, launch: RequestState | None
) -> None:
    steps = [update_step(state, generation, launch) for generation in GenerationState]
    others = [step for step in steps[1:] if step is not U.NOTHING]
    assert others == [U.DRAIN]
    assert update_step(state, GenerationState.DRAINING, launch) is U.DRAIN


@pytest.mark.parametrize(
    ("replicas", "state"),
    [
        ([ReplicaState.READY], S.READY),
        ([ReplicaState.READY, ReplicaState.READY], S.READY),
        ([ReplicaState.READY, ReplicaState.BACKING_OFF], S.DEGRADED),
        ([ReplicaState.READY, ReplicaState.FAILED], S.DEGRADED),
        ([ReplicaState.READY, ReplicaState.DRAINING], S.READY),
        ([ReplicaState.DRAINING], S.DEGRADED),
        ([ReplicaState.DRAINING, ReplicaState.FAILED], S.FAILED),
        ([ReplicaState.DRAINING, ReplicaState.BACKING_OFF], S.DEGRADED),
        ([ReplicaState.STARTING], S.DEGRADED),
        ([ReplicaState.ASLEEP], S.ASLEEP),
        ([ReplicaState.ASLEEP, ReplicaState.DRAINING], S.ASLEEP),
        ([ReplicaState.ASLEEP, ReplicaState.READY], S.READY),
        ([ReplicaState.ASLEEP, ReplicaState.BACKING_OFF], S.DEGRADED),
        ([ReplicaState.FAILED, ReplicaState.FAILED], S.FAILED),
        ([ReplicaState.STOPPED], S.FAILED),
        ([], S.FAILED),
    ],
)
def test_the_state_of_an_environment_follows_from_its_replicas(
    replicas: list[ReplicaState], state: EnvironmentState
) -> None:
    assert observed_state(replicas) is state
