# SPDX-License-Identifier: Apache-2.0
"""What was committed is moved into the database by a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from openenvd.requests_db.connections import checkpoints, sqlite
from openenvd.requests_db.connections.link import Link
from openenvd.requests_db.records import NewRequest
from openenvd.requests_db.states import Schedule
from openenvd.requests_db.transactions import submitting

THREAD = "requests-db-checkpoints"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set after the first checkpoint."""
    done, checkpoint = threading.Event(), sqlite.checkpoint

    def told(url: object) -> None:
        checkpoint(url)  # type: ignore[arg-type]
        done.set()

    monkeypatch.setattr(checkpoints, "COMMITS", 3)
    monkeypatch.setattr(sqlite, "checkpoint", told)
    return done


def submit(link: Link) -> None:
    with link.transaction() as connection:
        new = NewRequest("check", Schedule.SHORT, {"text": "x" * 10_000})
        submitting.submit(connection, new, None, 1.0, None)


def test_some_commits_later_the_database_itself_holds_them(
    path: Path, moved: threading.Event
) -> None:
    before = path.stat().st_size
    link = Link(path, writes=True)
    for _ in range(3):
        submit(link)
    assert moved.wait(30)
    assert path.stat().st_size >= before + 30_000
    link.close()


def test_its_thread_ends_with_the_last_link_that_writes(path: Path, moved: threading.Event) -> None:
    first, second = (Link(path, writes=True) for _ in range(2))
    for _ in range(3):
        submit(first)
        submit(second)
    assert moved.wait(30)
    first.close()
    assert THREAD in {thread.name for thread in threading.enumerate()}
    second.close()
    assert THREAD not in {thread.name for thread in threading.enumerate()}


def test_a_checkpoint_that_fails_harms_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def refuse(_url: object) -> None:
        tried.set()
        raise sqlite.DRIVER_ERRORS[0]("disk I/O error")

    monkeypatch.setattr(checkpoints, "COMMITS", 1)
    monkeypatch.setattr(sqlite, "checkpoint", refuse)
    link = Link(path, writes=True)
    submit(link)
    assert tried.wait(30)
    submit(link)
    link.close()
