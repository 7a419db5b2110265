# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of an environment."""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openenvd.environments import run_files
from openenvd.environments.engines.local import ports
from openenvd.environments.engines.local.ports import (
    FIRST_PORT,
    LAST_PORT,
    ORDERED_PORTS,
    PortOwner,
    holder_of,
    open_listeners,
    renew_reservations,
    reserved_for,
)
from openenvd.environments.shim.client import read_run_file
from openenvd.environments.shim.files import RUN_FILE_NAME
from openenvd.schema.errors import OperationFailed, PortInUse

from ..conftest import write_run_file

LOOPBACK = "127.0.0.1"
LAUNCHES = 500
OWNER = PortOwner("echo", Path("/nowhere/run"))


@pytest.fixture
def reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ports"
    monkeypatch.setattr(ports, "RESERVATIONS", folder)
    return folder


def write_port(owner: PortOwner, ordinal: int, port: int) -> None:
    run_dir = owner.runs / f"{owner.environment}-{ordinal}-1"
    write_run_file(
        run_dir, environment=owner.environment, ordinal=ordinal, number=ordinal, port=port
    )


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
        return True
    return False


@pytest.fixture
def read_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []

    def note(run_dir: Path) -> object:
        read.append(run_dir.name)
        return read_run_file(run_dir)

    monkeypatch.setattr("openenvd.environments.shim.client.read_run_file", note)
    monkeypatch.setattr(ports, "read_run_file", note)
    return read


@pytest.fixture
def reserve(tmp_path: Path, reservations: Path) -> Callable[[int], PortOwner]:
    def reserve_port(port: int) -> PortOwner:
        owner = PortOwner("echo", tmp_path / "run")
        write_port(owner, 0, port)
        reservations.mkdir(mode=0o700)
        told = {"environment": "echo", "runs": str(owner.runs)}
        (reservations / str(port)).write_text(json.dumps(told))
        assert reserved_for(port) == owner
        return owner

    return reserve_port


@pytest.fixture
def reservation(reservations: Path, reserve: Callable[[int], PortOwner]) -> Path:
    reserve(21000)
    return reservations / "21000"


@contextlib.contextmanager
def port_of(port: int | None = None) -> Iterator[int]:
    listeners = open_listeners(LOOPBACK, port, OWNER)
    try:
        yield listeners[0].getsockname()[1]
    finally:
        for one in listeners:
            one.close()


def test_without_a_port_a_free_one_of_the_range_is_taken_which_accepts_at_once() -> None:
    with port_of() as first, port_of() as second:
        assert first != second
        assert all(FIRST_PORT <= port <= LAST_PORT for port in (first, second))
    with port_of() as port, socket.create_connection((LOOPBACK, port)):
        assert holder_of(port) is not None


def test_a_port_of_root_is_refused_with_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int) -> list[socket.socket]:  # root, who runs tests, may have it
        raise PermissionError(errno.EACCES, "Permission denied", f"{host}:{port}")

    monkeypatch.setattr(ports, "open_listening_sockets", refuse)
    with pytest.raises(OperationFailed, match="port 80 is closed to ordinary users") as raised:
        open_listeners(LOOPBACK, 80, OWNER)
    assert "--port above 1023" in str(raised.value.hint)


def test_a_reserved_port_is_not_even_tried(
    reserve: Callable[[int], PortOwner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    reserve(port)
    monkeypatch.setattr(ports, "FIRST_PORT", port)
    monkeypatch.setattr(ports, "LAST_PORT", port)

    def try_often() -> None:
        for _ in range(LAUNCHES):
            with pytest.raises(PortInUse):
                open_listeners(LOOPBACK, None, OWNER)

    with ThreadPoolExecutor(1) as threads:
        launching = threads.submit(try_often)
        while not launching.done():  # an engine, which publishes the port of a replica
            socket.create_server((LOOPBACK, port)).close()
        launching.result()


def test_ports_are_reserved_again_with_one_look_at_each_run_file(
    tmp_path: Path, reservations: Path, read_folders: list[str]
) -> None:
    shared, own = PortOwner("shared", tmp_path / "run"), PortOwner("own", tmp_path / "run")
    for ordinal in range(10):
        write_port(shared, ordinal, 21000)
        write_port(own, ordinal, 21001 + ordinal)
    for _ in range(2):
        read_folders.clear()
        renew_reservations(own.runs, run_files.all_of(own.runs))
        assert len(read_folders) == len(set(read_folders)) == 20 + 1  # and the gateway's
        reserved = {int(file.name) for file in reservations.iterdir()}
        assert reserved == set(range(21000, 21011))
    assert (reserved_for(21000), reserved_for(21007)) == (shared, own)


def test_a_reserved_port_is_known_by_one_run_file_among_a_hundred(
    tmp_path: Path, reservations: Path, read_folders: list[str]
) -> None:
    many = PortOwner("many", tmp_path / "run")
    for number in range(100):
        write_port(many, number, FIRST_PORT + number)
    renew_reservations(many.runs, run_files.all_of(many.runs))
    read_folders.clear()
    assert reserved_for(FIRST_PORT + 50) == many
    assert read_folders == ["many-50-1"]
    (many.runs / "many-50-1" / RUN_FILE_NAME).unlink()
    write_port(many, 100, FIRST_PORT + 50)
    assert reserved_for(FIRST_PORT + 50) == many
    renew_reservations(many.runs, run_files.all_of(many.runs))
    read_folders.clear()
    assert reserved_for(FIRST_PORT + 50) == many
    assert read_folders == ["many-100-1"]


def test_a_port_that_another_home_has_is_not_reserved_again_for_this_one(
    tmp_path: Path, reserve: Callable[[int], PortOwner]
) -> None:
    other = reserve(21000)
    owner = PortOwner("echo", tmp_path / "home" / "run")
    write_port(owner, 0, 21000)
    renew_reservations(owner.runs, run_files.all_of(owner.runs))
    assert reserved_for(21000) == other


def test_a_free_port_among_many_reserved_ones_is_found_with_few_reads(
    tmp_path: Path, reservations: Path, read_folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one environment has them all, in another home."""
    first_port = (
        FIRST_PORT + 3000
    )  # other daemons of this machine may have hundreds of the first ones
    monkeypatch.setattr(ports, "FIRST_PORT", first_port)
    owners = [PortOwner(f"env{number}", tmp_path / "run") for number in range(100)]
    for number, owner in enumerate(owners):
        write_port(owner, 0, first_port + number)
    for number in range(100, 200):
        write_port(PortOwner("many", tmp_path / "run"), number, first_port + number)
    renew_reservations(tmp_path / "run", run_files.all_of(tmp_path / "run"))
    monkeypatch.setattr("random.sample", lambda every, _: reversed(every))
    many = run_files.of_environment(tmp_path / "run", "many")
    read_folders.clear()
    with port_of() as port:
        assert port > first_port + 200
    assert len(read_folders) == ORDERED_PORTS
    read_folders.clear()
    first = next(number for number in range(100) if is_free(first_port + number))
    for one in open_listeners(LOOPBACK, None, owners[first]):
        one.close()
    known = {each.replica_id: each for each in many[1:]}
    assert run_files.of_environment(tmp_path / "run", "many", known) == many
    before = [f"env{number}-0-1" for number in range(first)]
    assert read_folders == [*before, many[0].replica_id]  # and none of the owner's


def test_an_address_of_another_machine_is_an_error_of_the_system(reservations: Path) -> None:
    assert not reservations.exists()
    with pytest.raises(OSError, match="assign requested address"):
        open_listeners("192.0.2.1", 21000, OWNER)


def test_a_folder_of_reservations_that_others_have_or_can_write_to_is_not_read(
    reservation: Path,
) -> None:
    reservation.parent.chmod(0o777)
    assert reserved_for(21000) is None
    reservation.parent.chmod(0o700)
    if os.geteuid() == 0:  # who alone can give a folder to another user
        os.chown(reservation.parent, 12345, -1)
        assert reserved_for(21000) is None


def test_a_symlink_in_place_of_the_folder_is_neither_read_nor_written_to(reservation: Path) -> None:
    folder = reservation.parent
    folder.symlink_to(folder.rename(folder.with_name("elsewhere")))
    assert reserved_for(21000) is None
    with port_of():
        assert [file.name for file in folder.iterdir()] == ["21000"]
        assert json.loads(reservation.read_text())["runs"] != str(OWNER.runs)


def test_one_warning_says_that_ports_are_not_reserved(
    reservations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reservations.write_text("in the way")
    with port_of(), port_of():
        pass
    [warning] = caplog.messages
    assert f"no ports are reserved in {reservations}" in warning
