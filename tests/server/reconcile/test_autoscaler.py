# SPDX-License-Identifier: Apache-2.0
"""Environments that scale themselves: what is submitted, when, and why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from openenvd.requests_db.records import Environment
from openenvd.schema.states import EnvironmentState, ReplicaState
from openenvd.server.reconcile.own_requests import Autoscaler
from openenvd.server.reconcile.watches import Watches

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
    assert await world.asked() == ("trial", 2, "9 of 10 sessions are taken")
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
    assert await world.asked() == ("trial", wanted, "1 of 30 sessions are taken")


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
