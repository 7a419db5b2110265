# SPDX-License-Identifier: Apache-2.0
"""The revisions are those of the files, and whatever is at the path is met with the right words."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from openenvd.requests_db import migrate
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.errors import DatabaseCorrupt, DatabaseTooNew
from openenvd.requests_db.migrate import LATEST, REVISIONS, open_database
from openenvd.requests_db.sql import queries

MIGRATIONS = Path(migrate.__file__).with_name("migrations")


def schema_of(path: Path) -> list[tuple[str, str, str]]:
    """Every table and index with its SQL: constraints and conditions too."""
    connection = sqlite3.connect(path)
    query = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    rows = connection.execute(query).fetchall()
    connection.close()
    return rows


def test_the_list_of_revisions_is_that_of_the_files() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in reversed(list(script.walk_revisions()))) == REVISIONS
    assert script.get_current_head() == LATEST


def test_alembic_reads_the_stamp_of_a_fresh_database(path: Path) -> None:
    writer = WriteConnection(path)
    with writer.transaction() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == LATEST
    writer.close()


def test_opening_again_changes_nothing(path: Path) -> None:
    before = schema_of(path)
    open_database(path)
    assert schema_of(path) == before


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
    store = WriteConnection(file)
    assert store.read(queries.RUNNING) == []
    store.close()


def test_a_database_of_a_newer_version_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(DatabaseTooNew, match="9999") as caught:
        open_database(path)
    assert "upgrade openenvd" in str(caught.value.hint)


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "requests.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE songs (title)")
    connection.close()
    with pytest.raises(DatabaseCorrupt, match="not one of openenvd's"):
        open_database(file)
    assert [name for _, name, _ in schema_of(file)] == ["songs"]


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(output.stdout.split())


def test_the_states_import_no_sqlalchemy() -> None:
    assert "sqlalchemy" not in modules_after("import openenvd.schema.states")


def test_an_up_to_date_database_is_opened_without_alembic_or_the_orm(path: Path) -> None:
    modules = modules_after(
        "from openenvd.requests_db.migrate import open_database\n"
        "from openenvd.requests_db.connections.sqlite import WriteConnection\n"
        "from openenvd.requests_db.async_store import AsyncStore\n"
        "from openenvd.requests_db.sql import queries\n"
        f"open_database({str(path)!r}); WriteConnection({str(path)!r}).read(queries.RUNNING)"
    )
    assert not modules & {"alembic", "sqlalchemy.orm", "sqlalchemy.ext.asyncio"}
