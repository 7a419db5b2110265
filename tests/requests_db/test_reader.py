# SPDX-License-Identifier: Apache-2.0
"""The API's reads on `aiosqlite`: read-only, up to date, and usable again after an error."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openenvd.requests_db.connections import Reader
from openenvd.requests_db.errors import DatabaseCorrupt, DatabaseError, DatabaseUnwritable
from openenvd.requests_db.sql import queries
from openenvd.schema.states import RequestState

from .conftest import Api, Queue

COUNT = "SELECT count(*) FROM requests"


@pytest.fixture
async def reader(path: Path) -> AsyncIterator[Reader]:
    reader = Reader(path)
    yield reader
    await reader.close()


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "reader" in t.name]


async def test_a_read_waits_for_no_writer(api: Api, queue: Queue) -> None:
    with queue.transaction():
        assert await api.read(queries.COUNTS) == dict.fromkeys(RequestState, 0)
        assert await api.read(queries.list_requests()) == []


async def test_a_read_sees_every_acknowledged_write(api: Api) -> None:
    for count in range(1, 51):
        request = (await api.submit()).request
        assert await api.read(queries.get(request.id)) == request
        assert (await api.read(queries.COUNTS))["PENDING"] == count


async def test_a_read_leaves_no_snapshot_that_would_hold_up_a_checkpoint(
    api: Api, path: Path
) -> None:
    await api.submit()
    await api.read(queries.list_requests())
    await api.submit()
    other = sqlite3.connect(path)
    [(busy, in_log, moved)] = other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    assert (busy, in_log, moved) == (0, 0, 0)


async def test_a_reader_cannot_write(reader: Reader) -> None:
    with pytest.raises(DatabaseUnwritable, match="may not be written"):
        await reader.rows("UPDATE tally SET last_event = 7", ())
    assert await reader.rows("SELECT last_event FROM tally", ()) == [(0,)]


async def test_a_missing_database_is_named_and_not_created(tmp_path: Path) -> None:
    api = Api(tmp_path / "requests.db")
    with pytest.raises(DatabaseUnwritable, match="cannot be opened"):
        await api.read(queries.COUNTS)
    assert list(tmp_path.iterdir()) == []
    await api.close()
    assert reader_threads() == []


async def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    file = tmp_path / "requests.db"
    file.write_bytes(b"not a database" * 1000)
    api = Api(file)
    with pytest.raises(DatabaseCorrupt, match="not a SQLite database"):
        await api.read(queries.COUNTS)
    await api.close()


async def test_a_reader_opens_another_connection_after_an_error(reader: Reader) -> None:
    calls = [reader.rows(COUNT, ()), reader.rows("SELECT * FROM songs", ()), reader.rows(COUNT, ())]
    first, broken, second = await asyncio.gather(*calls, return_exceptions=True)
    assert first == second == [(0,)]
    assert isinstance(broken, DatabaseError)
    assert await reader.rows(COUNT, ()) == [(0,)]
    assert len(reader_threads()) == 1


async def test_any_number_of_readers_at_once_share_one_connection(reader: Reader) -> None:
    assert await asyncio.gather(*(reader.rows(COUNT, ()) for _ in range(200))) == [[(0,)]] * 200
    assert reader_threads() == ["requests-db-reader"]


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


async def test_a_cancelled_read_disturbs_no_other(reader: Reader) -> None:
    await reader.rows(COUNT, ())
    reads = [asyncio.ensure_future(reader.rows(COUNT, ())) for _ in range(3)]
    await asyncio.sleep(0)
    reads[1].cancel()
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert results[::2] == [[(0,)], [(0,)]]
    assert isinstance(results[1], asyncio.CancelledError)


async def test_a_path_may_contain_url_metacharacters(tmp_path: Path) -> None:
    file = tmp_path / "a?b#c%20d" / "requests.db"
    file.parent.mkdir()
    sqlite3.connect(file).close()
    reader = Reader(file)
    assert await reader.rows("SELECT 1", ()) == [(1,)]
    await reader.close()
