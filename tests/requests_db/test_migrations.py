# SPDX-License-Identifier: Apache-2.0
"""The revisions are those of the files, and whatever is at the path is met with the right words."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from openenvd.requests_db import migrate
from openenvd.requests_db.errors import DatabaseCorrupt, DatabaseTooNew
from openenvd.requests_db.migrate import LATEST, REVISIONS, open_database
from openenvd.requests_db.sql import queries

from .conftest import Queue

MIGRATIONS = Path(migrate.__file__).with_name("migrations")


# Every table and index with its constraints and conditions.
SCHEMA = "SELECT group_concat(name || coalesce(sql, '')) FROM sqlite_master ORDER BY name"


def test_revisions_are_those_of_the_files_and_opening_changes_none(
    queue: Queue, path: Path
) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in reversed(list(script.walk_revisions()))) == REVISIONS
    assert script.get_current_head() == LATEST
    before = queue.sql(SCHEMA)
    open_database(path)
    assert "ck_requests_state" in before
    assert queue.sql(SCHEMA) == before
    with queue.transaction() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == LATEST


def test_a_database_at_an_earlier_revision_is_upgraded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "REVISIONS", (*REVISIONS, "9998"))
    monkeypatch.setattr(migrate, "LATEST", "9998")
    upgraded: list[str] = []
    monkeypatch.setattr(migrate, "upgrade", lambda connection: upgraded.append("head"))
    open_database(path)
    assert upgraded == ["head"]


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
    queue.sql("UPDATE alembic_version SET version_num = '9999'")
    told = "is at revision 9999; this version knows revisions up to"
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


def test_an_up_to_date_database_is_opened_without_alembic_or_the_orm(path: Path) -> None:
    script = (
        "import sys\n"
        "from openenvd.requests_db.migrate import open_database\n"
        "from openenvd.requests_db.connections import WriteConnection\n"
        "from openenvd.requests_db.async_store import AsyncStore\n"
        "from openenvd.requests_db.sql import queries\n"
        f"open_database({str(path)!r}); WriteConnection({str(path)!r}).read(queries.RUNNING)\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"alembic", "sqlalchemy.orm", "sqlalchemy.ext.asyncio"}
