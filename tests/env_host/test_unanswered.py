# SPDX-License-Identifier: Apache-2.0
"""What becomes of connections that a dead child had not answered, by the kernel's own count."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from openenvd.env_host.ipc.fd_messages import close_all, copy_all
from openenvd.env_host.supervisor.orphaned_connections import Fate, Traffic, fate_of, traffic_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts these")

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A client, and the server's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


def test_a_connection_without_a_word_had_no_traffic(pair: Pair) -> None:
    assert traffic_of(pair[1].fileno()) == Traffic(0, 0)


def test_what_was_not_read_is_whoever_reads_it(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"hello")
    server.recv(5, socket.MSG_PEEK)  # it has come
    assert traffic_of(server.fileno()) == Traffic(0, 0)


def test_what_was_read_in_part_is_nobody_elses(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"hello")
    server.recv(2)
    assert traffic_of(server.fileno()) == Traffic(0, 2)


def test_what_was_answered_is_counted(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"hello")
    server.recv(5)
    server.sendall(b"w")
    assert traffic_of(server.fileno()) == Traffic(1, 5)


def test_a_client_that_will_say_no_more_is_told_rather_than_handed_on(pair: Pair) -> None:
    """The end of what it says counts as a byte, which is never unread."""
    client, server = pair
    client.sendall(b"hello")
    client.shutdown(socket.SHUT_WR)
    while traffic_of(server.fileno()) == Traffic(0, 0):  # the end comes after the words
        server.recv(5, socket.MSG_PEEK)
    assert traffic_of(server.fileno()) == Traffic(0, 1)


def test_of_anything_but_tcp_nothing_can_be_told() -> None:
    reading, writing = os.pipe()
    assert traffic_of(reading) is None
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("traffic", "known_bytes", "fate"),
    [
        (Traffic(0, 0), 0, Fate.GOES_ON),
        (Traffic(0, 40), 40, Fate.GOES_ON),
        (Traffic(0, 40), 0, Fate.IS_TOLD),
        (Traffic(0, 44), 40, Fate.IS_TOLD),
        (Traffic(1, 40), 40, Fate.ENDS),
        (None, 40, Fate.GOES_ON),
        (None, 0, Fate.ENDS),
    ],
)
def test_what_was_not_answered_goes_on_if_we_have_all_that_was_read(
    traffic: Traffic | None, known_bytes: int, fate: Fate
) -> None:
    assert fate_of(traffic, known_bytes) is fate


def test_of_what_is_accepted_as_much_is_copied_as_there_are_descriptors_for(pair: Pair) -> None:
    copies = copy_all([pair[1].fileno(), -1, pair[1].fileno()])
    assert len(copies) == 1
    close_all(copies)
