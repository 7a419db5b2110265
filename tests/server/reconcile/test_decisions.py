# SPDX-License-Identifier: Apache-2.0
"""The reconciler's decisions: plain values in, one step out."""

from __future__ import annotations

from itertools import product

import pytest

from openenvd.schema.states import (
    EnvironmentState,
    ReplicaState,
    RequestState,
)
from openenvd.server.reconcile.decisions import (
    Step,
    next_step,
    observed_state,
)

S = EnvironmentState
R = RequestState


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
@pytest.mark.parametrize("state", [S.PENDING, S.STARTING])
def test_a_live_environment_follows_its_launch(
    state: EnvironmentState, launch: RequestState | None, step: Step
) -> None:
    assert next_step(state, launch, None) is step


@pytest.mark.parametrize("launch", [None, *R])
@pytest.mark.parametrize("state", [S.READY, S.DEGRADED, S.ASLEEP])
def test_what_serves_goes_on_also_where_the_update_that_made_it_has_not_ended_well(
    state: EnvironmentState, launch: RequestState | None
) -> None:
    assert next_step(state, launch, None) is Step.SERVE


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


def test_nothing_is_said_of_an_environment_that_is_in_doubt() -> None:
    assert observed_state([], is_in_doubt=True) is S.DEGRADED
