# SPDX-License-Identifier: Apache-2.0
"""Replicas that their engine ends: which are replaced, when, and what is tried again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from openenvd.schema.states import ReplicaState
from openenvd.server.reconcile.own_requests import TOGETHER_SECONDS, Successors
from openenvd.server.reconcile.replica_watch import ReplicaWatch
from openenvd.system.process.process_identity import boot_seconds

from .conftest import Submissions, new_watch


class World(Submissions):
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
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.watches.clear()
    made.successors.look("trial")
    await made.tasks.end()


async def test_those_that_are_due_are_replaced_in_one_go_and_once(world: World) -> None:
    world.replica(990.0)
    world.replica(990.0 + TOGETHER_SECONDS)
    world.replica(1001.0 + TOGETHER_SECONDS)
    world.replica(None)
    world.successors.look("trial")
    reason = "the time limit of 2 of its replicas is over in 50 s"
    assert await world.asked() == ("trial", [0, 1], 50.0, reason)
    world.successors.look("trial")
    assert await world.is_quiet()


async def test_the_next_instance_of_a_replica_is_replaced_again_until_it_is_gone(
    world: World,
) -> None:
    world.replica(990.0)
    world.successors.look("trial")
    await world.asked()
    world.watches[0].status["instance"] = "8"
    world.successors.look("trial")
    assert (await world.asked())[1] == [0]
    world.watches.clear()
    world.successors.look("trial")
    assert not world.successors._asked  # nothing is remembered of replicas that are gone


async def test_what_is_not_due_yet_is_replaced_in_time_though_nothing_changes(
    world: World,
) -> None:
    world.replica(1000.05)
    world.successors.look("trial")
    assert await world.is_quiet()
    world.now += 1
    assert (await world.asked())[1] == [0]


async def test_a_request_that_is_refused_is_tried_again(world: World) -> None:
    world.refuses = 2
    world.replica(990.0)
    world.successors.look("trial")
    assert (await world.asked())[1] == [0]


async def test_what_has_its_own_address_or_drains_already_is_not_replaced(world: World) -> None:
    world.replica(990.0, address=None)
    world.replica(990.0, ReplicaState.DRAINING)
    world.successors.look("trial")
    assert await world.is_quiet()


async def test_a_step_of_the_clock_makes_nothing_due(world: World) -> None:
    """Times are those of `boot_seconds`."""
    world.successors.clock = Successors(world.tasks, lambda _: []).clock
    world.replica(boot_seconds() + 600)
    world.successors.look("trial")
    assert await world.is_quiet()
    world.replica(boot_seconds() - 90)
    world.successors.look("trial")
    reason = "the time limit of 1 of its replicas is over in 0 s"
    assert await world.asked() == ("trial", [1], 1.0, reason)


async def test_a_job_that_is_requeued_is_replaced_again_before_its_new_end(world: World) -> None:
    world.replica(990.0)
    world.successors.look("trial")
    await world.asked()
    status = world.watches[0].status
    status.update({"replace_at": None, "ends_at": None})
    world.successors.look("trial")
    status.update({"replace_at": 995.0, "ends_at": 1055.0})
    world.successors.look("trial")
    assert (await world.asked())[:3] == ("trial", [0], 55.0)


async def test_an_end_that_is_unknown_by_the_time_it_is_submitted_is_the_one_that_was_due(
    world: World,
) -> None:
    world.replica(990.0)
    world.successors.look("trial")
    world.watches[0].status.update({"replace_at": None, "ends_at": None})
    assert (await world.asked())[2] == 50.0


async def test_a_status_has_the_other_replicas_looked_at_only_when_its_end_has_changed(
    world: World,
) -> None:
    for _ in range(3):
        world.replica(2000.0)
    world.replica(None)
    for each in world.watches:
        world.successors.note(each)
    assert world.looks == 1  # at all of them
    one, last = world.watches[0].status, world.watches[-1].status
    one["sessions"] = last["sessions"] = 3
    world.successors.note(world.watches[0])
    world.successors.note(world.watches[-1])
    assert world.looks == 1
    one["replace_at"] = 990.0
    world.successors.note(world.watches[0])
    assert world.looks == 2
    assert (await world.asked())[1] == [0]
