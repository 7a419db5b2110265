# SPDX-License-Identifier: Apache-2.0
"""Calls that share a transaction: none fails because of another, and order is kept."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from openenvd.requests_db.records import NewRequest, QueueFull, Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import submitting
from openenvd.schema.states import Schedule

from .conftest import CHECK, Api, Queue


def submit(connection: Connection, key: str) -> str:
    new = NewRequest("check", Schedule.SHORT, {}, idempotency_key=key)
    submitting.submit(connection, new, now=1.5)
    return key


def break_down(connection: Connection) -> str:
    submit(connection, "never")
    raise RuntimeError("broken")


async def test_a_call_that_raises_is_rolled_back_and_the_others_of_its_group_are_written(
    api: Api,
) -> None:
    first, second, broken, third = await asyncio.gather(
        *(api.write(submit, key) for key in ("first", "second")),
        api.write(break_down),
        api.write(submit, "third"),
        return_exceptions=True,
    )
    assert [first, second, third] == ["first", "second", "third"]
    assert isinstance(broken, RuntimeError)
    found = await api.read(queries.list_requests())
    assert [request.idempotency_key for request in found] == ["third", "second", "first"]


async def test_calls_that_arrive_while_the_writer_is_busy_share_a_transaction(api: Api) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(connection: Connection) -> Connection:
        begun.set()
        go_on.wait()
        return connection

    transactions: list[object] = []

    def note(connection: Connection) -> None:
        transactions.append(connection.get_transaction())

    held = asyncio.ensure_future(api.write(hold))
    await asyncio.to_thread(begun.wait)
    others = [asyncio.ensure_future(api.write(note)) for _ in range(5)]
    await asyncio.sleep(0)  # they begin, and wait
    go_on.set()
    await asyncio.gather(held, *others)
    assert len(transactions) == 5
    assert len(set(map(id, transactions))) == 1


async def test_a_limit_holds_within_a_shared_transaction(api: Api) -> None:
    results = await asyncio.gather(*(api.offer(CHECK, max_pending=3) for _ in range(10)))
    assert [type(result) for result in results] == [Submitted] * 3 + [QueueFull] * 7


async def test_a_cancelled_caller_disturbs_no_other(api: Api) -> None:
    calls = [asyncio.ensure_future(api.submit()) for _ in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [Submitted, asyncio.CancelledError, Submitted]


async def test_closing_a_store_finishes_the_calls_that_wait(path: Path) -> None:
    api = Api(path)
    calls = [asyncio.ensure_future(api.submit()) for _ in range(100)]
    await asyncio.sleep(0)
    await api.generations()  # with a connection of its own
    await api.close()
    assert all(call.result() for call in calls)
    await api.close()
    links = [os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if os.path.exists(fd)]
    assert str(path) not in links
    assert list(path.parent.iterdir()) == [path]  # the last connection removes the journal
    assert not [t for t in threading.enumerate() if t.name.startswith("requests-db")]


async def test_an_answer_is_given_after_the_commit(api: Api, queue: Queue) -> None:
    request = (await api.submit()).request
    assert queue.get(request.id) == request


@pytest.mark.parametrize("calls", [1, 200])
async def test_any_number_of_calls_is_answered(api: Api, calls: int) -> None:
    results = await asyncio.gather(*(api.submit() for _ in range(calls)))
    assert [result.request.seq for result in results] == list(range(1, calls + 1))


@pytest.fixture
def no_room_for_threads() -> Iterator[None]:
    """Let the system refuse every new thread: none gets a stack as large as the address space."""
    before = threading.stack_size(2**47)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_room_for_threads")
def test_a_store_whose_thread_cannot_start_is_not_made(path: Path) -> None:
    """Its first submission would be refused, kept by the pool, and written with the next one."""
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Api(path)
