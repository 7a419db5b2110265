# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of an environment."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openenvd.environments.engines.local import ports
from openenvd.environments.engines.local.ports import (
    FIRST_PORT,
    LAST_PORT,
    PortOwner,
    holder_of,
    open_listeners,
    reserved_for,
)
from openenvd.environments.run_files import RUN_FILE_VERSION
from openenvd.schema.errors import PortInUse

LOOPBACK = "127.0.0.1"
LAUNCHES = 500
OWNER = PortOwner("echo", Path("/nowhere/run"))


@pytest.fixture
def reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ports"
    monkeypatch.setattr(ports, "RESERVATIONS", folder)
    return folder


@pytest.fixture
def reserve(tmp_path: Path, reservations: Path) -> Callable[[int], PortOwner]:
    """Reserves a port for an environment that has it."""

    def reserve_port(port: int) -> PortOwner:
        replica = {
            "version": RUN_FILE_VERSION,
            "replica_id": "echo-0-1",
            "environment": "echo",
            "port": port,
            **dict.fromkeys(("request_id", "socket_path", "log_path", "host"), ""),
            "number": 0,
            "created_at": 0.0,
        }
        owner = PortOwner("echo", tmp_path / "run")
        (owner.runs / "echo-0-1").mkdir(parents=True)
        run_file = owner.runs / "echo-0-1" / "replica.json"
        run_file.write_text(json.dumps({**replica, "ordinal": 0, "port": port}))
        reservations.mkdir(mode=0o700)
        told = {"environment": "echo", "runs": str(owner.runs)}
        (reservations / str(port)).write_text(json.dumps(told))
        assert reserved_for(port) == owner
        return owner

    return reserve_port


@pytest.fixture
def reservation(reservations: Path, reserve: Callable[[int], PortOwner]) -> Path:
    """The reservation of port 21000."""
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


def test_without_a_port_a_free_one_of_the_range_is_taken() -> None:
    with port_of() as first, port_of() as second:
        assert first != second
        assert all(FIRST_PORT <= port <= LAST_PORT for port in (first, second))


def test_a_port_of_another_environment_is_in_use() -> None:
    with port_of() as first, pytest.raises(PortInUse), port_of(first):
        pass


def test_a_port_that_is_free_and_reserved_is_its_environments_alone(
    reserve: Callable[[int], PortOwner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    owner = reserve(port)
    with pytest.raises(PortInUse, match=f"port {port} is reserved for echo of {owner.runs.parent}"):
        open_listeners(LOOPBACK, port, OWNER)
    monkeypatch.setattr(ports, "FIRST_PORT", port)
    monkeypatch.setattr(ports, "LAST_PORT", port)
    with pytest.raises(PortInUse, match="all ports"):
        open_listeners(LOOPBACK, None, OWNER)
    for listener in open_listeners(LOOPBACK, port, owner):
        listener.close()


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


def test_an_error_for_a_taken_port_names_its_process() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            open_listeners(LOOPBACK, port, OWNER)
    assert caught.value.pid == os.getpid()
    assert f"port {port}" in str(caught.value)
    assert f"(pid {os.getpid()})" in str(caught.value)


def test_a_listener_accepts_at_once() -> None:
    with port_of() as port, socket.create_connection((LOOPBACK, port)):
        assert holder_of(port) is not None


def test_an_address_of_another_machine_is_an_error_of_the_system(reservations: Path) -> None:
    assert not reservations.exists()
    with pytest.raises(OSError, match="assign requested address"):
        open_listeners("192.0.2.1", 21000, OWNER)


def test_a_folder_of_reservations_that_others_can_write_to_is_not_read(reservation: Path) -> None:
    reservation.parent.chmod(0o777)
    assert reserved_for(21000) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_reservations_of_another_user_is_not_read(reservation: Path) -> None:
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
