# SPDX-License-Identifier: Apache-2.0
"""Full disks, folders without permission, damaged files: named, and mended without a restart."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection

from openenvd.requests_db import connections, errors
from openenvd.requests_db.connections import open_database
from openenvd.requests_db.records import NewRequest, Outcome
from openenvd.requests_db.sql import queries
from openenvd.schema.states import RequestState, Schedule

from ..disks import fill_disk, use_up_files
from .conftest import Api, Queue

PAGE_OF_TEXT = NewRequest("noop", Schedule.SHORT, {"text": "x" * 20_000})


@pytest.fixture
async def sides(small_disk: Path) -> AsyncIterator[tuple[Api, Queue]]:
    file = small_disk / "requests.db"
    open_database(file)
    api, queue = Api(file), Queue(file)
    yield api, queue
    await api.close()
    queue.close()


async def test_a_full_disk_is_named_and_nothing_acknowledged_is_lost(
    sides: tuple[Api, Queue], small_disk: Path
) -> None:
    api, queue = sides
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 2**19)
    queued: list[str] = []
    with suppress(errors.DatabaseFull):
        while True:
            queued.append((await api.submit(PAGE_OF_TEXT)).request.id)
    with pytest.raises(errors.DatabaseFull) as caught:
        queue.claim(100)
    assert "df -h" in str(caught.value.hint)
    assert (await api.read(queries.COUNTS))["PENDING"] == len(queued)  # reading still works
    with pytest.raises(errors.DatabaseFull):
        await api.submit(PAGE_OF_TEXT)
    ballast.unlink()
    assert queue.claimed(10) == queued[:10]
    outcomes = [Outcome(request_id, RequestState.SUCCEEDED, 3.5) for request_id in queued[:10]]
    assert len(queue.record(outcomes=outcomes)) == 10


async def test_an_outcome_that_met_a_full_disk_can_be_recorded_again(
    sides: tuple[Api, Queue], small_disk: Path
) -> None:
    _, queue = sides
    request = queue.make(RequestState.RUNNING)
    ballast = fill_disk(small_disk)
    with pytest.raises(errors.DatabaseFull):
        queue.end(request.id, result="y" * 200_000)
    ballast.unlink()
    [event] = queue.end(request.id, result="y" * 200_000)
    assert event.data == {"state": "SUCCEEDED"}


def test_a_database_cannot_be_made_on_a_full_disk(small_disk: Path) -> None:
    ballast = fill_disk(small_disk)
    with pytest.raises(
        errors.DatabaseFull, match=f"no space left on the disk of {small_disk}"
    ) as caught:
        open_database(small_disk / "requests.db")
    assert f"df -h {small_disk}" in str(caught.value.hint)
    assert "openenv prune" in str(caught.value.hint)
    ballast.unlink()
    open_database(small_disk / "requests.db")


@pytest.mark.parametrize("files_left", [0, 1, 2])
def test_a_disk_without_room_for_another_file_is_no_matter_of_permissions(
    small_disk: Path, files_left: int
) -> None:
    """SQLite says of the -wal and -shm files that they cannot be opened."""
    for path in use_up_files(small_disk)[:files_left]:
        path.unlink()
    with pytest.raises(errors.DatabaseFull, match="no space left on the disk"):
        open_database(small_disk / "requests.db")


@pytest.fixture
def read_only(path: Path) -> Iterator[Path]:
    """A database on a file system that lets even root only read."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        path.chmod(0o400)
        path.parent.chmod(0o500)
        yield path
        path.parent.chmod(0o700)
        return
    folder = str(path.parent)
    for options in (["--bind", folder, folder], ["-o", "remount,ro,bind", folder]):
        if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
            pytest.skip("this machine does not let us mount")
    yield path
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_folder_that_cannot_be_written_is_named(read_only: Path) -> None:
    with pytest.raises(errors.DatabaseUnwritable) as caught:
        open_database(read_only)
    what_helps = "mount it writable" if os.geteuid() == 0 else "permissions"
    assert what_helps in str(caught.value.hint)
    with pytest.raises(errors.DatabaseUnwritable) as caught:
        open_database(read_only.with_name("other.db"))
    assert what_helps in str(caught.value.hint)


def test_what_is_no_database_is_named_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(errors.DatabaseUnwritable, match="No such file") as caught:
        open_database(tmp_path / "nowhere" / "requests.db")
    assert "OPENENV_HOME" in str(caught.value.hint)
    with pytest.raises(errors.DatabaseUnwritable, match="Is a directory") as caught:
        open_database(tmp_path)
    assert "move the folder away" in str(caught.value.hint)
    queue = Queue(tmp_path / "gone" / "requests.db")
    with pytest.raises(errors.DatabaseUnwritable, match="cannot be opened"):
        queue.read(queries.RUNNING)
    queue.close()
    file = tmp_path / "requests.db"
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(errors.DatabaseCorrupt, match="not a SQLite database") as refused:
        open_database(file)
    assert "move the file away" in str(refused.value.hint)
    assert file.read_bytes().startswith(b"not a database")


def test_a_damaged_file_is_named(queue: Queue, path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(errors.DatabaseCorrupt, match="damaged"):
        queue.claim()


def test_a_database_without_a_table_is_damage(queue: Queue, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE requests")
    with pytest.raises(errors.DatabaseCorrupt, match="damaged: no such table"):
        queue.claim()


@pytest.fixture
def damaged(queue: Queue, path: Path) -> Path:
    """One page in the middle, which holds requests that ended long ago, is overwritten."""
    for _ in range(100):
        queue.make(payload={"x": "y" * 900})
    queue.close()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(content.index(b"y" * 900) // 4096 * 4096)
        file.write(os.urandom(4096))
    return path


def test_a_damaged_page_is_found_in_time(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.DatabaseCorrupt, match=r"the file is damaged .*[Pp]age"):
        open_database(damaged)
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(connections, "_CHECK_STEPS", 1)
    open_database(damaged)


@pytest.mark.parametrize("offset", [0, 20, 60, 100])
def test_a_schema_that_is_no_text_is_damage(path: Path, offset: int) -> None:
    _overwrite(path, b"CREATE TABLE", offset)
    with pytest.raises(errors.DatabaseCorrupt, match="the file is damaged") as caught:
        open_database(path)
    assert "move the file away" in str(caught.value.hint)


def test_a_value_that_is_no_text_is_damage(queue: Queue, path: Path) -> None:
    queue.make(operation="planted_name")
    queue.close()
    _overwrite(path, b"planted_name", 3)
    open_database(path)
    with pytest.raises(errors.DatabaseCorrupt, match="a text in it is no UTF-8"):
        queue.claim()


@pytest.mark.parametrize(
    ("column", "value"), [("payload", "{no JSON"), ("state", "GONE"), ("error", "[]")]
)
def test_a_value_that_cannot_be_read_is_damage(
    queue: Queue, path: Path, column: str, value: str
) -> None:
    made = queue.make()
    queue.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        connection.execute(f"UPDATE requests SET {column} = ?", [value])
    with pytest.raises(errors.DatabaseCorrupt, match=rf"is damaged \(requests.{column}\)"):
        queue.get(made.id)


def _overwrite(path: Path, text: bytes, offset: int) -> None:
    content = path.read_bytes()
    assert text in content
    with path.open("r+b") as file:
        begin = -1
        while (begin := content.find(text, begin + 1)) >= 0:
            file.seek(begin + offset)
            file.write(b"\xff")


def test_a_failed_transaction_or_closed_store_leaves_nothing_and_works_again(queue: Queue) -> None:
    def fail(connection: Connection) -> None:
        connection.exec_driver_sql("UPDATE tally SET last_event = 7")
        connection.exec_driver_sql("SELECT * FROM songs")

    with pytest.raises(errors.DatabaseError, match="no such table"):
        queue.write(fail)
    assert queue.sql("SELECT last_event FROM tally") == 0
    queue.close()
    queue.close()
    assert queue.read(queries.RUNNING) == []


def test_errors_of_the_disk_and_a_process_that_holds_the_file_are_named(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_NOTADB, "SQLITE_NOTADB"
    assert str(connections.error_of(error, tmp_path)).endswith("(SQLITE_NOTADB)")
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_SECONDS", 0.0)
    holder, queue = connections.create_engine(path), Queue(path)
    with holder.begin(), pytest.raises(errors.DatabaseBusy, match="another process"):
        queue.read(queries.RUNNING)
    assert queue.read(queries.RUNNING) == []
    queue.close()
