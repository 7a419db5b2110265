# SPDX-License-Identifier: Apache-2.0
"""What can be told of a connection from a copy of it, by the kernel's own count."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from openenvd.env_host.last_words import Traffic, traffic_of

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
    assert traffic_of(pair[1].fileno()) is Traffic.NONE


def test_what_was_not_read_is_whoever_reads_it(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"hello")
    server.recv(5, socket.MSG_PEEK)  # it has come
    assert traffic_of(server.fileno()) is Traffic.NONE


def test_what_was_read_in_part_is_nobody_elses(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"hello")
    server.recv(2)
    assert traffic_of(server.fileno()) is Traffic.READ


def test_what_was_answered_is_known_to_be(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"hello")
    server.recv(5)
    server.sendall(b"w")
    assert traffic_of(server.fileno()) is Traffic.ANSWERED


def test_a_client_that_will_say_no_more_is_told_rather_than_handed_on(pair: Pair) -> None:
    """The end of what it says counts as a byte, which is never unread."""
    client, server = pair
    client.sendall(b"hello")
    client.shutdown(socket.SHUT_WR)
    while traffic_of(server.fileno()) is Traffic.NONE:  # the end comes after the words
        server.recv(5, socket.MSG_PEEK)
    assert traffic_of(server.fileno()) is Traffic.READ


def test_of_anything_but_tcp_nothing_can_be_told() -> None:
    reading, writing = os.pipe()
    assert traffic_of(reading) is Traffic.ANSWERED
    os.close(reading)
    os.close(writing)
