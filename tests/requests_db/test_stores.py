# SPDX-License-Identifier: Apache-2.0
"""The API's store: calls share a transaction, and reads wait for no writer."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from openenvd.requests_db.connections import Reader
from openenvd.requests_db.errors import DatabaseError, DatabaseUnwritable
from openenvd.requests_db.records import NewRequest, QueueFull, Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import submitting
from openenvd.schema.states import RequestState, Schedule

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


async def test_a_shared_transaction_has_its_limit_and_bears_a_cancelled_caller(api: Api) -> None:
    results = await asyncio.gather(*(api.offer(CHECK, max_pending=3) for _ in range(10)))
    assert [type(result) for result in results] == [Submitted] * 3 + [QueueFull] * 7
    calls = [asyncio.ensure_future(api.submit()) for _ in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in outcomes] == [Submitted, asyncio.CancelledError, Submitted]


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


COUNT = "SELECT count(*) FROM requests"


@pytest.fixture
async def reader(path: Path) -> AsyncIterator[Reader]:
    reader = Reader(path)
    yield reader
    await reader.close()


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "reader" in t.name]


async def test_a_read_waits_for_no_writer_and_sees_all(api: Api, queue: Queue, path: Path) -> None:
    with queue.transaction():
        assert await api.read(queries.COUNTS) == dict.fromkeys(RequestState, 0)
        assert await api.read(queries.list_requests()) == []
    for count in range(1, 51):
        request = (await api.submit()).request
        assert await api.read(queries.get(request.id)) == request
        assert (await api.read(queries.COUNTS))["PENDING"] == count
    await api.submit()
    await api.read(queries.list_requests())
    await api.submit()
    other = sqlite3.connect(path)
    [(busy, in_log, moved)] = other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    assert (busy, in_log, moved) == (0, 0, 0)


async def test_a_missing_database_is_not_created_and_any_path_is_read(tmp_path: Path) -> None:
    api = Api(tmp_path / "requests.db")
    with pytest.raises(DatabaseUnwritable, match="cannot be opened"):
        await api.read(queries.COUNTS)
    assert list(tmp_path.iterdir()) == []
    await api.close()
    assert reader_threads() == []
    file = tmp_path / "a?b#c%20d" / "requests.db"
    file.parent.mkdir()
    sqlite3.connect(file).close()
    reader = Reader(file)
    assert await reader.rows("SELECT 1", ()) == [(1,)]
    await reader.close()


async def test_readers_share_a_connection_that_cannot_write(reader: Reader) -> None:
    assert await asyncio.gather(*(reader.rows(COUNT, ()) for _ in range(200))) == [[(0,)]] * 200
    assert reader_threads() == ["requests-db-reader"]
    with pytest.raises(DatabaseUnwritable, match="may not be written"):
        await reader.rows("UPDATE tally SET last_event = 7", ())
    assert await reader.rows("SELECT last_event FROM tally", ()) == [(0,)]
    calls = [reader.rows(COUNT, ()), reader.rows("SELECT * FROM songs", ()), reader.rows(COUNT, ())]
    first, broken, second = await asyncio.gather(*calls, return_exceptions=True)
    assert first == second == [(0,)]
    assert isinstance(broken, DatabaseError)
    assert await reader.rows(COUNT, ()) == [(0,)]
    assert len(reader_threads()) == 1
    reads = [asyncio.ensure_future(reader.rows(COUNT, ())) for _ in range(3)]
    await asyncio.sleep(0)
    reads[1].cancel()
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert results[::2] == [[(0,)], [(0,)]]
    assert isinstance(results[1], asyncio.CancelledError)


async def test_closing_answers_the_reads_that_wait_and_ends_the_thread(reader: Reader) -> None:
    await reader.rows(COUNT, ())
    waiting = [asyncio.ensure_future(reader.rows(COUNT, ())) for _ in range(100)]
    await asyncio.sleep(0)
    await reader.close()
    assert reader_threads() == []
    assert await asyncio.gather(*waiting) == [[(0,)]] * 100
    await reader.close()


async def test_a_reader_that_is_closed_while_it_opens_leaves_no_thread(reader: Reader) -> None:
    opening = asyncio.ensure_future(reader.rows(COUNT, ()))
    await asyncio.sleep(0)
    await reader.close()
    assert await opening == [(0,)]
    assert reader_threads() == []
