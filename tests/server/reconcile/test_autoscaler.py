# SPDX-License-Identifier: Apache-2.0
"""Environments that scale themselves: what is submitted, when, and why."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from openenvd.requests_db.records import Environment
from openenvd.schema.states import EnvironmentState, ReplicaState
from openenvd.server.reconcile.own_requests import TOGETHER_SECONDS, Autoscaler, Successors
from openenvd.server.reconcile.replica_watch import ReplicaWatch
from openenvd.server.reconcile.watches import Watches
from openenvd.system.process.process_identity import boot_seconds

from .conftest import Submissions, new_watch

SPEC: dict[str, Any] = {"max_replicas": 4, "scale_down_seconds": 60.0}


class World(Submissions):
    def __init__(self) -> None:
        super().__init__()
        self.index = Watches()
        self.autoscaler = Autoscaler(self.tasks, self.index.occupancy, self.submit, **self.options)

    def add(self, state: ReplicaState = ReplicaState.READY) -> None:
        self.watches.append(new_watch(len(self.watches), state))
        self.index.add(self.watches[-1])

    def serve(self, replicas: int, **spec: Any) -> None:
        while len(self.watches) < replicas:
            self.add()
        state = EnvironmentState.READY
        row = Environment("trial", {**SPEC, **spec, "replicas": replicas}, state, 0.0, 0.0, "1")
        self.autoscaler.serve(row)

    def sessions(self, *counts: int) -> None:
        for each, count in zip(self.watches, counts, strict=True):
            each.status = {"info": {"max_sessions": 10}, "sessions": count}
            self.index.note(each)
            self.autoscaler.note("trial")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.autoscaler.forget("trial")
    await made.tasks.end()


async def test_more_are_asked_for_once_with_the_reason(world: World) -> None:
    world.serve(1)
    world.sessions(8)
    assert await world.is_quiet()
    world.sessions(9)
    assert await world.asked() == ("trial", 2, "9 of 10 sessions taken")
    world.sessions(10)
    assert await world.is_quiet()  # until that request has ended
    world.serve(2)
    world.sessions(10, 9)
    assert (await world.asked())[1] == 4


@pytest.mark.parametrize(("spec", "wanted"), [({}, 1), ({"min_replicas": 2}, 2)])
async def test_fewer_are_asked_for_when_the_time_has_come_though_nothing_changes(
    world: World, spec: dict[str, Any], wanted: int
) -> None:
    world.serve(3, scale_down_seconds=0.05, **spec)
    world.now += 1
    world.sessions(1, 0, 0)
    assert await world.is_quiet()
    world.now += 1  # the timer follows the loop's clock
    assert await world.asked() == ("trial", wanted, "1 of 30 sessions taken")


async def test_replicas_that_are_drained_count_for_nothing(world: World) -> None:
    world.serve(1)
    world.add(ReplicaState.DRAINING)
    world.sessions(4, 10)
    assert await world.is_quiet()


async def test_what_was_refused_or_failed_is_asked_for_again(world: World) -> None:
    world.refuses = 1
    world.serve(1)
    world.sessions(10)
    assert (await world.asked())[1] == 2
    assert world.refuses == 0
    world.serve(1)  # the request has ended, and changed nothing
    assert (await world.asked())[1] == 2


@pytest.mark.parametrize("spec", [{"max_replicas": None}, {}])
async def test_what_does_not_scale_itself_is_left_alone(world: World, spec: dict[str, Any]) -> None:
    world.serve(1, **spec)
    if not spec:
        world.autoscaler.forget("trial")
    world.sessions(10)
    assert await world.is_quiet()


# Replicas that their engine ends: which are replaced, when, and what is tried again.


class Ending(Submissions):
    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.successors = Successors(self.tasks, self.watched, self.submit, **self.options)

    def watched(self, _: str) -> list[ReplicaWatch]:
        self.looks += 1
        return self.watches

    def replica(
        self,
        replace_at: float | None,
        state: ReplicaState = ReplicaState.READY,
        address: str | None = "http://gate",
    ) -> None:
        """One more, which says when it is to be replaced; it ends a minute later."""
        made = new_watch(len(self.watches), state, address=address)
        ends_at = None if replace_at is None else replace_at + 60
        made.status = {"instance": "7", "replace_at": replace_at, "ends_at": ends_at}
        self.watches.append(made)


@pytest.fixture
async def ending() -> AsyncIterator[Ending]:
    made = Ending()
    yield made
    made.watches.clear()
    made.successors.look("trial")
    await made.tasks.end()


async def test_those_that_are_due_are_replaced_in_one_go_and_once(ending: Ending) -> None:
    ending.replica(990.0)
    ending.replica(990.0 + TOGETHER_SECONDS)
    ending.replica(1001.0 + TOGETHER_SECONDS)
    ending.replica(None)
    ending.successors.look("trial")
    reason = "the time limit of 2 of its replicas is over in 50 s"
    assert await ending.asked() == ("trial", [0, 1], 50.0, reason)
    ending.successors.look("trial")
    assert await ending.is_quiet()


async def test_the_next_instance_of_a_replica_is_replaced_again_until_it_is_gone(
    ending: Ending,
) -> None:
    ending.replica(990.0)
    ending.successors.look("trial")
    await ending.asked()
    ending.watches[0].status["instance"] = "8"
    ending.successors.look("trial")
    assert (await ending.asked())[1] == [0]
    ending.watches.clear()
    ending.successors.look("trial")
    assert not ending.successors._asked  # nothing is remembered of replicas that are gone


async def test_what_is_not_due_yet_is_replaced_in_time_though_nothing_changes(
    ending: Ending,
) -> None:
    ending.replica(1000.05)
    ending.successors.look("trial")
    assert await ending.is_quiet()
    ending.now += 1
    assert (await ending.asked())[1] == [0]


async def test_a_request_that_is_refused_is_tried_again(ending: Ending) -> None:
    ending.refuses = 2
    ending.replica(990.0)
    ending.successors.look("trial")
    assert (await ending.asked())[1] == [0]


async def test_what_has_its_own_address_or_drains_already_is_not_replaced(ending: Ending) -> None:
    ending.replica(990.0, address=None)
    ending.replica(990.0, ReplicaState.DRAINING)
    ending.successors.look("trial")
    assert await ending.is_quiet()


async def test_a_step_of_the_clock_makes_nothing_due(ending: Ending) -> None:
    """Times are those of `boot_seconds`."""
    ending.successors.clock = Successors(ending.tasks, lambda _: [], ending.submit).clock
    ending.replica(boot_seconds() + 600)
    ending.successors.look("trial")
    assert await ending.is_quiet()
    ending.replica(boot_seconds() - 90)
    ending.successors.look("trial")
    reason = "the time limit of 1 of its replicas is over in 0 s"
    assert await ending.asked() == ("trial", [1], 1.0, reason)


async def test_a_replica_whose_end_moves_is_replaced_again_before_that(ending: Ending) -> None:
    ending.replica(990.0)
    ending.successors.look("trial")
    await ending.asked()
    status = ending.watches[0].status
    status.update({"replace_at": None, "ends_at": None})
    ending.successors.look("trial")
    status.update({"replace_at": 995.0, "ends_at": 1055.0})
    ending.successors.look("trial")
    assert (await ending.asked())[:3] == ("trial", [0], 55.0)


async def test_an_end_that_is_unknown_by_the_time_it_is_submitted_is_the_one_that_was_due(
    ending: Ending,
) -> None:
    ending.replica(990.0)
    ending.successors.look("trial")
    ending.watches[0].status.update({"replace_at": None, "ends_at": None})
    assert (await ending.asked())[2] == 50.0


async def test_a_status_has_the_other_replicas_looked_at_only_when_its_end_has_changed(
    ending: Ending,
) -> None:
    for _ in range(3):
        ending.replica(2000.0)
    ending.replica(None)
    for each in ending.watches:
        ending.successors.note(each)
    assert ending.looks == 1  # at all of them
    one, last = ending.watches[0].status, ending.watches[-1].status
    one["sessions"] = last["sessions"] = 3
    ending.successors.note(ending.watches[0])
    ending.successors.note(ending.watches[-1])
    assert ending.looks == 1
    one["replace_at"] = 990.0
    ending.successors.note(ending.watches[0])
    assert ending.looks == 2
    assert (await ending.asked())[1] == [0]
