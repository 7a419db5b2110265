# SPDX-License-Identifier: Apache-2.0
"""Full disks, folders without permission, damaged files: named, and mended without a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import sqlite
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.errors import (
    DatabaseBusy,
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseUnwritable,
)
from openenvd.requests_db.migrate import open_database
from openenvd.requests_db.records import NewRequest, Outcome
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.states import RequestState, Schedule

PAGE_OF_TEXT = NewRequest("noop", Schedule.SHORT, {"text": "x" * 20_000})


def fill(folder: Path) -> Path:
    """Take whatever is left of the disk."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    return ballast


def use_up_files(folder: Path) -> list[Path]:
    """Make files until the disk has no more to give."""
    made: list[Path] = []
    with suppress(OSError):
        while True:
            path = folder / f"file-{len(made)}"
            path.touch()
            made.append(path)
    return made


async def submit_until_full(store: AsyncStore) -> list[str]:
    ids: list[str] = []
    while True:
        try:
            result = await store.write(submitting.submit, PAGE_OF_TEXT, now=1.5)
        except DatabaseFull:
            return ids
        assert isinstance(result, Submitted)
        ids.append(result.request.id)


async def test_a_full_disk_is_named_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    file = small_disk / "requests.db"
    open_database(file)
    store, dispatch = AsyncStore(file), WriteConnection(file)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 2**19)
    queued = await submit_until_full(store)
    with pytest.raises(DatabaseFull) as caught:
        dispatch.write(dispatching.claim, Schedule.SHORT, 100, 2.5)
    assert "df -h" in str(caught.value.hint)
    assert (await store.read(queries.COUNTS))["PENDING"] == len(queued)  # reading still works
    with pytest.raises(DatabaseFull):
        await store.write(submitting.submit, PAGE_OF_TEXT, now=1.5)

    ballast.unlink()
    claimed = dispatch.write(dispatching.claim, Schedule.SHORT, 10, 2.5).requests
    assert [request.id for request in claimed] == queued[:10]
    outcomes = [Outcome(request.id, RequestState.SUCCEEDED, 3.5) for request in claimed]
    assert len(dispatch.write(dispatching.record, outcomes=outcomes)) == 10
    await store.close()
    dispatch.close()


async def test_an_outcome_that_met_a_full_disk_can_be_recorded_again(small_disk: Path) -> None:
    file = small_disk / "requests.db"
    open_database(file)
    store, dispatch = AsyncStore(file), WriteConnection(file)
    result = await store.write(submitting.submit, PAGE_OF_TEXT, now=1.5)
    assert isinstance(result, Submitted)
    dispatch.write(dispatching.claim, Schedule.SHORT, 1, 2.5)
    ballast = fill(small_disk)
    outcome = Outcome(result.request.id, RequestState.SUCCEEDED, 3.5, result="y" * 200_000)
    with pytest.raises(DatabaseFull):
        dispatch.write(dispatching.record, outcomes=[outcome])
    ballast.unlink()
    [event] = dispatch.write(dispatching.record, outcomes=[outcome])
    assert event.data == {"state": "SUCCEEDED"}
    await store.close()
    dispatch.close()


def test_a_database_cannot_be_made_on_a_full_disk(small_disk: Path) -> None:
    ballast = fill(small_disk)
    with pytest.raises(DatabaseFull, match=f"no space left on the disk of {small_disk}") as caught:
        open_database(small_disk / "requests.db")
    assert f"df -h {small_disk}" in caught.value.hint
    assert "openenv prune" in caught.value.hint
    ballast.unlink()
    open_database(small_disk / "requests.db")


@pytest.mark.parametrize("files_left", [0, 1, 2])
def test_a_disk_without_room_for_another_file_is_no_matter_of_permissions(
    small_disk: Path, files_left: int
) -> None:
    """SQLite says of the -wal and -shm files that they cannot be opened."""
    made = use_up_files(small_disk)
    for path in made[:files_left]:
        path.unlink()
    with pytest.raises(DatabaseFull, match="no space left on the disk"):
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
    with pytest.raises(DatabaseUnwritable) as caught:
        open_database(read_only)
    what_helps = "mount it writable" if os.geteuid() == 0 else "permissions"
    assert what_helps in str(caught.value.hint)
    with pytest.raises(DatabaseUnwritable) as caught:
        open_database(read_only.with_name("other.db"))
    assert what_helps in str(caught.value.hint)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnwritable, match="No such file") as caught:
        open_database(tmp_path / "nowhere" / "requests.db")
    assert "OPENENV_HOME" in str(caught.value.hint)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnwritable, match="Is a directory"):
        open_database(tmp_path)


def test_a_database_that_was_moved_away_is_named_and_not_made_again(path: Path) -> None:
    store = WriteConnection(path.parent / "gone" / "requests.db")
    with pytest.raises(DatabaseUnwritable, match="cannot be opened"):
        store.read(queries.RUNNING)
    store.close()


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "requests.db"
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(DatabaseCorrupt, match="not a SQLite database") as caught:
        open_database(file)
    assert "move the file away" in str(caught.value.hint)
    assert file.read_bytes().startswith(b"not a database")


def test_a_damaged_file_is_named(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    store = WriteConnection(path)
    with pytest.raises(DatabaseCorrupt, match="damaged"):
        store.write(dispatching.claim, Schedule.SHORT, 1, 1.5)
    store.close()


@pytest.fixture
def damaged(path: Path) -> Path:
    """One page in the middle, which holds requests that ended long ago, is overwritten."""
    writer = WriteConnection(path)
    with writer.transaction() as connection:
        for _ in range(100):
            submitting.submit(
                connection, NewRequest("noop", Schedule.SHORT, {"x": "y" * 900}), now=1.5
            )
    writer.close()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(content.index(b"y" * 900) // 4096 * 4096)
        file.write(os.urandom(4096))
    return path


def test_a_damaged_page_is_found_when_the_database_is_opened(damaged: Path) -> None:
    with pytest.raises(DatabaseCorrupt, match=r"the file is damaged .*[Pp]age"):
        open_database(damaged)


@pytest.mark.parametrize("offset", [0, 20, 60, 100])
def test_a_schema_that_is_no_text_is_damage(path: Path, offset: int) -> None:
    _overwrite(path, b"CREATE TABLE", offset)
    with pytest.raises(DatabaseCorrupt, match="the file is damaged") as caught:
        open_database(path)
    assert "move the file away" in str(caught.value.hint)


def test_a_value_that_is_no_text_is_damage(path: Path) -> None:
    writer = WriteConnection(path)
    with writer.transaction() as connection:
        new = NewRequest("planted_name", Schedule.SHORT, {})
        submitting.submit(connection, new, now=1.5)
    writer.close()
    _overwrite(path, b"planted_name", 3)
    open_database(path)
    store = WriteConnection(path)
    with pytest.raises(DatabaseCorrupt, match="a text in it is no UTF-8"):
        store.write(dispatching.claim, Schedule.SHORT, 1, 1.5)
    store.close()


def _overwrite(path: Path, text: bytes, offset: int) -> None:
    content = path.read_bytes()
    assert text in content
    with path.open("r+b") as file:
        begin = -1
        while (begin := content.find(text, begin + 1)) >= 0:
            file.seek(begin + offset)
            file.write(b"\xff")


def test_the_search_for_damaged_pages_is_bounded_in_time(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(sqlite, "_CHECK_STEPS", 1)
    open_database(damaged)


def test_another_process_that_holds_the_file_too_long_is_named(
    path: Path,
) -> None:
    holder = sqlite.create_engine(path, 0.0)
    writer = WriteConnection(path, busy_timeout_seconds=0.0)
    with holder.begin(), pytest.raises(DatabaseBusy, match="another process"), writer.transaction():
        pass
    with writer.transaction() as connection:
        assert queries.RUNNING.run(connection) == []
    writer.close()


def test_a_failed_transaction_leaves_nothing_and_the_next_one_works(path: Path) -> None:
    writer = WriteConnection(path)

    def fail() -> None:
        with writer.transaction() as connection:
            connection.exec_driver_sql("UPDATE tally SET last_event = 7")
            connection.exec_driver_sql("SELECT * FROM songs")

    with pytest.raises(DatabaseError, match="no such table"):
        fail()
    with writer.transaction() as connection:
        assert connection.exec_driver_sql("SELECT last_event FROM tally").scalar() == 0
    writer.close()


def test_a_store_may_be_closed_twice_and_before_it_was_used(path: Path) -> None:
    store = WriteConnection(path)
    store.close()
    store.close()
    assert store.read(queries.RUNNING) == []
    store.close()
