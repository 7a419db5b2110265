# SPDX-License-Identifier: Apache-2.0
"""Streams that are taken up again, over the real tables; `test_api.py` has them over the wire."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.sse import ServerSentEvent

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.records import NewRequest, Outcome, Request, Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.settings import Paths, Settings
from openenvd.schema.states import RequestState, Schedule
from openenvd.server.api import streams
from openenvd.server.api.dependencies import Dependencies
from openenvd.server.api.streams import Position, RequestStream, everything_stream, wait_until_final
from openenvd.server.dispatch.submission import Submitter
from openenvd.server.events import EventBus

from ..conftest import WAIT_SECONDS

Told = list[tuple[str, str, dict[str, Any]]]


class World:
    """A request that runs, and the parts of a daemon that streams use."""

    def __init__(
        self, paths: Paths, store: AsyncStore, bus: EventBus, dispatch: WriteConnection
    ) -> None:
        self.paths, self.store, self.bus, self.dispatch = paths, store, bus, dispatch
        self.stopping = asyncio.Event()
        self.submitter = Submitter(store, cast(Any, None), bus, Settings())
        self.deps = cast(Dependencies, SimpleNamespace(**vars(self)))
        new = NewRequest("check", Schedule.SHORT, {})
        assert isinstance(dispatch.write(submitting.submit, new, now=1.0), Submitted)
        claim = dispatch.write(dispatching.claim, Schedule.SHORT, 1, 2.0)
        self.request: Request = claim.requests[0]
        self.seq = dispatch.read(queries.LAST_SEQ)

    def progress(self, count: int) -> None:
        rows = [(self.request.id, {"step": step}, 3.0) for step in range(count)]
        self.dispatch.write(dispatching.record, progress=rows)

    def succeed(self) -> None:
        outcome = Outcome(self.request.id, RequestState.SUCCEEDED, time.time(), result={})
        self.dispatch.write(dispatching.record, outcomes=[outcome])  # and publish it to nobody

    def stream(self, position: Position | None = None, logs: bool = True) -> Any:
        return RequestStream(self.deps, self.request, position or Position(), logs=logs).items()


@pytest.fixture
async def world(paths: Paths, store: AsyncStore, bus: EventBus, dispatch: WriteConnection) -> World:
    return World(paths, store, bus, dispatch)


async def rest_of(stream: AsyncIterator[ServerSentEvent]) -> Told:
    async with asyncio.timeout(WAIT_SECONDS):
        return [
            (str(item.id), str(item.event), json.loads(item.raw_data or ""))
            async for item in stream
            if item.comment is None
        ]


async def test_a_client_gets_what_it_missed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PAGE", 4)
    world.progress(10)
    world.succeed()
    told = await rest_of(world.stream(Position(world.seq, 0)))
    assert [data["step"] for _, name, data in told if name == "progress"] == list(range(10))
    assert (told[-1][1], told[-1][2]["state"]) == ("state", "SUCCEEDED")
    told = await rest_of(world.stream(Position(), logs=False))
    assert [(name, data.get("step")) for _, name, data in told] == [
        ("progress", 9),
        ("state", None),
    ]


async def test_an_end_between_look_up_and_stream_is_sent(world: World) -> None:
    world.succeed()
    told = await rest_of(world.stream(Position(world.seq), logs=False))
    assert [data["state"] for _, _, data in told] == ["SUCCEEDED"]


async def test_the_stream_of_everything_makes_up_for_all_that_was_missed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PAGE", 4)
    world.progress(10)
    world.stopping.set()
    told = await rest_of(everything_stream(world.deps, Position(1, 0)))
    assert [data["seq"] for _, _, data in told] == list(range(2, 13))


async def test_the_log_comes_before_the_end_unfinished_line_and_all(world: World) -> None:
    world.paths.request_log(world.request.id).write_text("one\ntwo")
    world.succeed()
    told = await rest_of(world.stream(Position(world.seq)))
    assert [name for _, name, _ in told] == ["log", "state"]
    assert told[0][2]["text"] == "one\ntwo"


async def test_a_client_that_reads_too_slowly_is_sent_away_to_come_back(world: World) -> None:
    stream = world.stream(logs=False)
    assert json.loads((await anext(stream)).raw_data)["state"] == "RUNNING"
    [subscription] = world.bus._subscriptions[world.request.id]
    subscription.lagged = True
    subscription.wake.set()
    assert await rest_of(stream) == []
    assert world.bus._subscriptions == {None: []}


async def test_a_wait_ends_with_the_daemon_or_with_its_time(world: World) -> None:
    request = await wait_until_final(world.deps, world.request.id, 0.01)
    assert request.state is RequestState.RUNNING
    waiting = asyncio.create_task(wait_until_final(world.deps, world.request.id, 3600))
    while not world.bus._subscriptions.get(world.request.id):
        await asyncio.sleep(0)
    world.stopping.set()
    world.bus.wake_all()
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await waiting).state is RequestState.RUNNING
