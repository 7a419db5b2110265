# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of one address."""

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.system.net import listening_sockets
from openenvd.system.net.listening_sockets import (
    MAX_LISTENERS,
    QUEUE_LENGTH,
    descriptors_text,
    listening,
    open_listening_sockets,
    sockets_of,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT as of Linux")

# A stranger: another program of the same user, which asks for the very option that we use.
STRANGER = """
import socket, sys
one = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
one.bind((sys.argv[1], int(sys.argv[2])))
one.listen()
"""


@contextlib.contextmanager
def opened(host: str = "127.0.0.1", port: int = 0) -> Iterator[list[socket.socket]]:
    sockets = open_listening_sockets(host, port)
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()


def port_of(sockets: list[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


@linux_only
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_other_process_can_listen_at_the_address(host: str) -> None:
    with opened(host) as sockets:
        assert len(listening(sockets)) > 1
        for _ in range(2):  # an attempt leaves nothing that lets in the next
            command = [sys.executable, "-c", STRANGER, host, str(port_of(sockets))]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "Address already in use" in run.stderr
    command[-1] = str(port_of_free(host))
    assert subprocess.run(command, check=False).returncode == 0  # it can where nobody listens


def port_of_free(host: str) -> int:
    with socket.create_server((host, 0), family=family_of(host)) as free:
        return int(free.getsockname()[1])


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@linux_only
def test_a_crowd_waits_in_the_queues_of_all() -> None:
    queue = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with opened() as sockets, contextlib.ExitStack() as clients:
        wanted = min(MAX_LISTENERS, -(-QUEUE_LENGTH // queue))
        listeners = listening(sockets)
        assert len(listeners) == wanted
        for _ in range(400):
            client = clients.enter_context(socket.create_connection(sockets[0].getsockname()))
            assert client.getpeername()[1] == port_of(sockets)
        ready, _, _ = select.select(listeners, [], [], 5.0)
        assert ready == listeners  # by a hash: that one of 8 gets none of 400 has a chance of 1e-22


def test_an_address_in_use_is_named_and_sockets_are_passed_on() -> None:
    with opened() as sockets:
        port = port_of(sockets)
        with pytest.raises(OSError, match="in use") as caught:
            open_listening_sockets("127.0.0.1", port)
    assert caught.value.filename == f"127.0.0.1:{port}"
    with opened() as sockets:
        text = descriptors_text(os.dup(one.fileno()) for one in sockets)
        copies = sockets_of(text)
        assert {one.getsockname() for one in copies} == {sockets[0].getsockname()}
        for one in copies:
            one.close()


def test_where_strangers_cannot_be_kept_out_there_is_one_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_sockets, "_end_quick_binds", lambda _: False)
    with opened() as sockets:
        assert listening(sockets) == sockets[:1] == sockets
        with pytest.raises(OSError, match="in use"), opened(port=port_of(sockets)):
            pass
