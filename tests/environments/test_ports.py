# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of an environment."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.environments.errors import PortInUse
from openenvd.environments.providers.ports import (
    FIRST_PORT,
    LAST_PORT,
    PortOwner,
    holder_of,
    open_listeners,
)

LOOPBACK = "127.0.0.1"
OWNER = PortOwner("echo", Path("/nowhere/run"))


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


def test_an_address_of_another_machine_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        open_listeners("192.0.2.1", 21000, OWNER)
