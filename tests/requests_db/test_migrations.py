# SPDX-License-Identifier: Apache-2.0
"""A database is migrated to the version of this code, or refused with an explanation."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from openenvd.requests_db import connections
from openenvd.requests_db.connections import open_database
from openenvd.requests_db.errors import DatabaseCorrupt, DatabaseError, DatabaseTooNew
from openenvd.requests_db.sql import queries

from .conftest import Queue

# Every table and index with its constraints and conditions.
SCHEMA = "SELECT group_concat(name || coalesce(sql, '')) FROM sqlite_master ORDER BY name"


def test_opening_again_changes_nothing(queue: Queue, path: Path) -> None:
    before = queue.sql(SCHEMA), queue.sql("PRAGMA schema_version"), queue.sql("PRAGMA data_version")
    open_database(path)
    after = queue.sql(SCHEMA), queue.sql("PRAGMA schema_version"), queue.sql("PRAGMA data_version")
    assert "ck_requests_state" in before[0]
    assert after == before
    assert queue.sql("PRAGMA user_version") == 1


@pytest.mark.parametrize("found", [0, 1], ids=["before numbers were written", "first version"])
def test_each_migration_that_is_missing_runs_once_and_all_or_none(
    queue: Queue, path: Path, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    queue.sql(f"PRAGMA user_version = {found}")

    def add(column: str) -> Callable[[Connection], object]:
        return lambda c: c.exec_driver_sql(f"ALTER TABLE requests ADD COLUMN {column}")

    before = queue.sql(SCHEMA)
    monkeypatch.setattr(connections, "MIGRATIONS", (add("colour"), add("id")))
    with pytest.raises(DatabaseError, match="duplicate column name: id"):
        open_database(path)
    assert (queue.sql(SCHEMA), queue.sql("PRAGMA user_version")) == (before, found)
    for migrations in (add("colour"),), (add("colour"), add("size")):
        monkeypatch.setattr(connections, "MIGRATIONS", migrations)
        open_database(path)
    assert queue.sql("SELECT count(colour) + count(size) FROM requests") == 0
    assert queue.sql("PRAGMA user_version") == 3


def test_threads_that_open_at_once_make_one_database(tmp_path: Path) -> None:
    file = tmp_path / "requests.db"
    failures: list[BaseException] = []

    def open_it() -> None:
        try:
            open_database(file)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    queue = Queue(file)
    assert queue.read(queries.RUNNING) == []
    queue.close()


def test_a_newer_or_other_database_is_left_alone(queue: Queue, path: Path, tmp_path: Path) -> None:
    queue.sql("PRAGMA user_version = 9999")
    told = "is at version 9999; this openenvd knows versions up to 1"
    with pytest.raises(DatabaseTooNew, match=told) as caught:
        open_database(path)
    assert "upgrade openenvd" in str(caught.value.hint)
    file = tmp_path / "other.db"
    queue = Queue(file)
    queue.sql("CREATE TABLE songs (title)")
    with pytest.raises(DatabaseCorrupt, match="not one of openenvd's"):
        open_database(file)
    assert queue.sql("SELECT group_concat(name) FROM sqlite_master") == "songs"
    queue.close()


def test_an_up_to_date_database_is_opened_without_the_orm(path: Path) -> None:
    script = (
        "import sys\n"
        "from openenvd.requests_db.connections import open_database\n"
        "from openenvd.requests_db.connections import WriteConnection\n"
        "from openenvd.requests_db.async_store import AsyncStore\n"
        "from openenvd.requests_db.sql import queries\n"
        f"open_database({str(path)!r}); WriteConnection({str(path)!r}).read(queries.RUNNING)\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"sqlalchemy.orm", "sqlalchemy.ext.asyncio"}
