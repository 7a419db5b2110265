# SPDX-License-Identifier: Apache-2.0
"""The index of watches: by environment, and how full the replicas of a launch are."""

from dataclasses import replace
from random import Random

import pytest

from openenvd.environments.replica_policy import Occupancy
from openenvd.schema.states import ReplicaState
from openenvd.server.reconcile.replica_watch import BEGIN_SESSIONS, ReplicaWatch
from openenvd.server.reconcile.watches import Watches

from .conftest import new_watch

COUNTED = (*BEGIN_SESSIONS, ReplicaState.BACKING_OFF)


def walked(watches: list[ReplicaWatch]) -> Occupancy | None:
    counted = [watch for watch in watches if watch.replica.state in COUNTED]
    slots = [size for watch in counted if (size := watch.max_sessions)]
    sessions = sum(watch.status.get("sessions", 0) for watch in counted)
    return Occupancy(len(counted), max(slots), sessions) if slots else None


@pytest.mark.parametrize("state", ReplicaState)
def test_replicas_that_may_begin_sessions_again_are_counted(state: ReplicaState) -> None:
    """A sleeping replica counts, because it can have sessions again: here there are two."""
    index = Watches()
    for ordinal, its in enumerate((ReplicaState.READY, state)):
        watch = new_watch(ordinal, its)
        index.add(watch)
        watch.status = {"info": {"max_sessions": 10}, "sessions": 1 - ordinal}
        index.note(watch)
    ends = state in (ReplicaState.DRAINING, ReplicaState.FAILED, ReplicaState.STOPPED)
    expected = Occupancy(replicas=1 if ends else 2, slots=10, sessions=1)
    assert index.occupancy("trial", "1") == expected


def test_whatever_happens_the_sums_are_those_of_the_replicas_that_are_watched() -> None:
    draw, index, watches = Random(3), Watches(), list[ReplicaWatch]()
    for number in range(2000):
        what = draw.choice(("add", "remove", "state", "status", "status"))
        if what == "add" or not watches:
            watches.append(new_watch(number, draw.choice(list(ReplicaState))))
            index.add(watches[-1])
        elif what == "remove":
            watch = watches.pop(draw.randrange(len(watches)))
            assert index.remove(watch.replica.id) is watch
            index.note(watch)  # a last word of a task that is being cancelled
        else:
            watch = draw.choice(watches)
            if what == "state":
                watch.replica = replace(watch.replica, state=draw.choice(list(ReplicaState)))
            else:
                slots = draw.choice((None, 4, 16))
                watch.status = {"info": {"max_sessions": slots}, "sessions": draw.randrange(5)}
            index.note(watch)
        assert index.occupancy("trial", "1") == walked(watches)
        assert set(index.of("trial")) == set(watches) == set(index.values())
    for watch in watches:
        index.remove(watch.replica.id)
    assert (index._by_environment, index._sums, index._shares) == ({}, {}, {})


def test_a_launch_has_the_replicas_of_its_own_and_an_environment_those_of_all() -> None:
    index = Watches()
    old, new = new_watch(0), new_watch(1, request_id="2")
    for watch in (old, new):
        watch.status = {"info": {"max_sessions": 4}, "sessions": watch.run_file.ordinal}
        index.add(watch)
    assert index.of("trial") == [old, new]
    assert index.of("trial", "2") == [new]
    assert index.of("other") == []
    assert index.occupancy("trial", "1") == Occupancy(1, 4, 0)
    assert index.occupancy("trial", "2") == Occupancy(1, 4, 1)
    assert index.occupancy("other", "1") is None
