# SPDX-License-Identifier: Apache-2.0
"""The listening socket of an environment."""

from __future__ import annotations

import os
import socket

import pytest

from openenvd.environments.errors import PortInUse
from openenvd.environments.providers.ports import FIRST_PORT, LAST_PORT, holder_of, open_listener

LOOPBACK = "127.0.0.1"


def test_without_a_port_a_free_one_of_the_range_is_taken() -> None:
    with open_listener(LOOPBACK, None) as first, open_listener(LOOPBACK, None) as second:
        ports = {listener.getsockname()[1] for listener in (first, second)}
    assert len(ports) == 2
    assert all(FIRST_PORT <= port <= LAST_PORT for port in ports)


def test_an_error_for_a_taken_port_names_its_process() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            open_listener(LOOPBACK, port)
    assert caught.value.pid == os.getpid()
    assert f"port {port}" in str(caught.value)
    assert f"(pid {os.getpid()})" in str(caught.value)


def test_a_listener_accepts_at_once() -> None:
    with (
        open_listener(LOOPBACK, None) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        assert holder_of(listener.getsockname()[1]) is not None


def test_an_address_of_another_machine_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        open_listener("192.0.2.1", 21000)
