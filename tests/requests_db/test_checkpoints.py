# SPDX-License-Identifier: Apache-2.0
"""Committed pages are moved into the database by a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import sqlite
from openenvd.requests_db.connections.checkpoints import COMMITS
from openenvd.requests_db.connections.write_connection import WriteConnection
from openenvd.requests_db.records import NewRequest
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.states import Schedule
from openenvd.requests_db.transactions import submitting

THREAD = "requests-db-checkpoints"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set after the first checkpoint."""
    done, checkpoint = threading.Event(), sqlite.checkpoint

    def noted(path: Path) -> None:
        checkpoint(path)
        done.set()

    monkeypatch.setattr(sqlite, "checkpoint", noted)
    return done


def submit(writer: WriteConnection) -> None:
    with writer.transaction() as connection:
        new = NewRequest("check", Schedule.SHORT, {"text": "x" * 10_000})
        submitting.submit(connection, new, now=1.0)


def test_a_checkpoint_follows_every_so_many_commits(path: Path, moved: threading.Event) -> None:
    before = path.stat().st_size
    writer = WriteConnection(path)
    for _ in range(COMMITS):
        submit(writer)
    assert moved.wait(30)
    assert path.stat().st_size >= before + COMMITS * 10_000
    writer.close()


def test_the_checkpoint_thread_exits_with_the_last_connection_that_writes(
    path: Path, moved: threading.Event
) -> None:
    first, second = (WriteConnection(path) for _ in range(2))
    for _ in range(COMMITS):
        submit(first)
        submit(second)
    assert moved.wait(30)
    first.close()
    assert THREAD in {thread.name for thread in threading.enumerate()}
    second.close()
    assert THREAD not in {thread.name for thread in threading.enumerate()}


def test_commits_succeed_after_a_failed_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def refuse(_path: Path) -> None:
        tried.set()
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite, "checkpoint", refuse)
    writer = WriteConnection(path)
    for _ in range(COMMITS):
        submit(writer)
    assert tried.wait(30)
    submit(writer)
    writer.close()


@pytest.fixture
def no_room_for_threads() -> Iterator[None]:
    """Let the system refuse every new thread: none gets a stack as large as the address space."""
    before = threading.stack_size(2**47)
    yield
    threading.stack_size(before)


async def test_a_checkpoint_thread_that_cannot_start_doubles_no_submission(
    path: Path, request: pytest.FixtureRequest
) -> None:
    store, writer = AsyncStore(path), WriteConnection(path)
    for _ in range(COMMITS - 1):
        submit(writer)
    request.getfixturevalue("no_room_for_threads")
    new = NewRequest("check", Schedule.SHORT, {})
    results = await asyncio.gather(
        *(store.write(submitting.submit, new, now=1.0) for _ in range(40))
    )
    writer.close()
    assert [type(result) for result in results] == [Submitted] * 40
    threading.stack_size(0)
    assert (await store.read(queries.counts()))["PENDING"] == COMMITS - 1 + 40
    await store.close()


@pytest.mark.usefixtures("no_room_for_threads")
def test_a_store_whose_thread_cannot_start_is_not_made(path: Path) -> None:
    """Its first submission would be refused, kept by the pool, and written with the next one."""
    with pytest.raises(RuntimeError, match="can't start new thread"):
        AsyncStore(path)
