# SPDX-License-Identifier: Apache-2.0
"""The reconciler's decisions: plain values in, one step out."""

from itertools import product

import pytest

from openenvd.schema.states import EnvironmentState, ReplicaState, RequestState
from openenvd.server.reconcile.decisions import Step, next_step, observed_state

S = EnvironmentState
R = RequestState


@pytest.mark.parametrize(
    ("states", "launches", "downs", "step"),
    [
        # A live environment follows its launch, which had succeeded if it has been collected.
        ([S.PENDING, S.STARTING], [R.PENDING], [None], Step.QUEUED),
        ([S.PENDING, S.STARTING], [R.RUNNING], [None], Step.STARTING),
        ([S.PENDING, S.STARTING], [R.SUCCEEDED, None], [None], Step.SERVE),
        ([S.PENDING, S.STARTING], [R.FAILED], [None], Step.ABANDON),
        ([S.PENDING, S.STARTING], [R.CANCELLED], [None], Step.CANCEL),
        # What serves goes on, also where the update that made it has not ended well.
        ([S.READY, S.DEGRADED, S.ASLEEP], [None, *R], [None], Step.SERVE),
        # A stopping environment follows its down, and goes on until that is written.
        ([S.STOPPING], [R.SUCCEEDED], [R.PENDING, R.RUNNING], Step.RELINQUISH),
        ([S.STOPPING], [R.SUCCEEDED], [R.SUCCEEDED, R.FAILED, R.CANCELLED], Step.RETIRE),
        ([S.STOPPING], [R.SUCCEEDED], [None], Step.SERVE),
        ([S.FAILED], [None, *R], [None, *R], Step.NOTHING),
        # A launch that ends after its environment was taken down is swept after.
        ([S.STOPPED], [R.PENDING, R.RUNNING], [None], Step.NOTHING),
        ([S.STOPPED], [R.SUCCEEDED, R.FAILED, R.CANCELLED], [None], Step.SWEEP),
    ],
)
def test_the_next_step_follows_from_state_launch_and_down(
    states: list[S], launches: list[R | None], downs: list[R | None], step: Step
) -> None:
    for state, launch, down in product(states, launches, downs):
        assert next_step(state, launch, down) is step, (state, launch, down)


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
