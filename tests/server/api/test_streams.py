# SPDX-License-Identifier: Apache-2.0
"""Streams that are taken up again, over the real tables; `test_api.py` has them over the wire."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.sse import ServerSentEvent

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.records import NewRequest, Outcome, Request
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.settings import Paths, Settings
from openenvd.schema.states import RequestState, Schedule
from openenvd.server.api import streams
from openenvd.server.api.dependencies import Dependencies
from openenvd.server.api.streams import Position, RequestStream, everything_stream, wait_until_final
from openenvd.server.dispatch.submission import Submitter
from openenvd.server.events.bus import EventBus

from ..conftest import WAIT_SECONDS

Json = dict[str, Any]


@pytest.fixture
async def deps(paths: Paths, store: AsyncStore, bus: EventBus) -> Dependencies:
    """The deps that streams use; nothing of them asks the executor."""
    nobody = cast(Any, None)
    parts = {
        "paths": paths,
        "store": store,
        "bus": bus,
        "submitter": Submitter(store, nobody, bus, Settings()),
        "stopping": asyncio.Event(),
    }
    return cast(Dependencies, SimpleNamespace(**parts))


@pytest.fixture
async def request_of(store: AsyncStore, dispatch: WriteConnection) -> Request:
    """A request that runs."""
    new = NewRequest("check", Schedule.SHORT, {})
    assert isinstance(await store.write(submitting.submit, new, now=1.0), Submitted)
    return dispatch.write(dispatching.claim, Schedule.SHORT, 1, 2.0).requests[0]


def parse(item: ServerSentEvent) -> tuple[str, str, Json]:
    return str(item.id), str(item.event), json.loads(item.raw_data or "")


async def rest_of(stream: AsyncIterator[ServerSentEvent]) -> list[tuple[str, str, Json]]:
    async with asyncio.timeout(WAIT_SECONDS):
        return [parse(item) async for item in stream if item.comment is None]


def progress(dispatch: WriteConnection, request: Request, count: int) -> None:
    dispatch.write(
        dispatching.record, progress=[(request.id, {"step": step}, 3.0) for step in range(count)]
    )


def succeed(dispatch: WriteConnection, request: Request) -> Outcome:
    outcome = Outcome(request.id, RequestState.SUCCEEDED, time.time(), result={})
    dispatch.write(dispatching.record, outcomes=[outcome])
    return outcome


async def test_a_client_that_missed_many_pages_of_events_gets_them_all_and_then_the_end(
    deps: Dependencies,
    dispatch: WriteConnection,
    request_of: Request,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "REPLAY_PAGE", 4)
    seq = await deps.store.read(queries.LAST_SEQ)
    progress(dispatch, request_of, 10)
    succeed(dispatch, request_of)
    stream = RequestStream(deps, request_of, Position(seq, 0), logs=True)
    told = await rest_of(stream.items())
    assert [data["step"] for _, name, data in told if name == "progress"] == list(range(10))
    assert (told[-1][1], told[-1][2]["state"]) == ("state", "SUCCEEDED")


async def test_the_stream_of_everything_makes_up_for_all_that_was_missed(
    deps: Dependencies,
    dispatch: WriteConnection,
    request_of: Request,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "REPLAY_PAGE", 4)
    progress(dispatch, request_of, 10)
    deps.stopping.set()
    told = await rest_of(everything_stream(deps, Position(1, 0)))
    assert [data["seq"] for _, _, data in told] == list(range(2, 13))


async def test_a_new_stream_begins_with_how_things_stand(
    deps: Dependencies, dispatch: WriteConnection, request_of: Request
) -> None:
    progress(dispatch, request_of, 10)
    succeed(dispatch, request_of)
    told = await rest_of(RequestStream(deps, request_of, Position(), logs=True).items())
    assert [(name, data["state"]) for _, name, data in told] == [("state", "SUCCEEDED")]


async def test_an_end_between_look_up_and_stream_is_sent(
    deps: Dependencies, dispatch: WriteConnection, request_of: Request
) -> None:
    seq = await deps.store.read(queries.LAST_SEQ)
    succeed(dispatch, request_of)  # its event is published to nobody
    told = await rest_of(RequestStream(deps, request_of, Position(seq), logs=False).items())
    assert [data["state"] for _, _, data in told] == ["SUCCEEDED"]


async def test_the_log_comes_before_the_end_unfinished_line_and_all(
    deps: Dependencies, dispatch: WriteConnection, request_of: Request
) -> None:
    seq = await deps.store.read(queries.LAST_SEQ)
    deps.paths.request_log(request_of.id).write_text("one\ntwo")
    succeed(dispatch, request_of)
    told = await rest_of(RequestStream(deps, request_of, Position(seq), logs=True).items())
    assert [name for _, name, _ in told] == ["log", "state"]
    assert told[0][2]["text"] == "one\ntwo"


async def test_a_client_that_reads_too_slowly_is_sent_away_to_come_back(
    deps: Dependencies, request_of: Request, bus: EventBus
) -> None:
    stream = RequestStream(deps, request_of, Position(), logs=False).items()
    assert parse(await anext(stream))[2]["state"] == "RUNNING"
    [subscription] = bus._subscriptions[request_of.id]
    subscription.lagged = True
    subscription.wake.set()
    assert await rest_of(stream) == []
    assert bus._subscriptions == {None: []}


async def test_a_wait_ends_with_the_daemon(deps: Dependencies, request_of: Request) -> None:
    waiting = asyncio.create_task(wait_until_final(deps, request_of.id, 3600))
    while not deps.bus._subscriptions.get(request_of.id):
        await asyncio.sleep(0)
    deps.stopping.set()
    deps.bus.wake_all()
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await waiting).state is RequestState.RUNNING


async def test_a_wait_that_times_out_returns_the_current_state(
    deps: Dependencies, request_of: Request
) -> None:
    request = await wait_until_final(deps, request_of.id, 0.01)
    assert request.state is RequestState.RUNNING


@pytest.mark.parametrize("text", [None, "", "x", "1", "1:", ":1", "-1:0", "1:2:3"])
def test_an_id_that_is_not_ours_is_the_beginning(text: str | None) -> None:
    assert Position.parse(text) == Position(0, 0)
