# SPDX-License-Identifier: Apache-2.0
"""Backlog and distributor with a real listener and real inboxes; the test plays the shards."""

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from openenvd.env_host.ipc.fd_messages import Unanswered, connection_message
from openenvd.env_host.ipc.scoreboard import Field, Scoreboard, now_microseconds
from openenvd.env_host.startup import SPARE_FDS
from openenvd.env_host.supervisor import acceptor, distributor
from openenvd.env_host.supervisor.acceptor import CROWD, Backlog
from openenvd.env_host.supervisor.distributor import MIN_IN_MESSAGE, WINDOW_MESSAGES, Distributor
from openenvd.system.process.descriptors import (
    Message,
    close_all,
    packet_pair,
    receive_message,
    send_message,
)

MAX_FDS = 20_000
WINDOW = MIN_IN_MESSAGE * WINDOW_MESSAGES  # where no crowd waits


class House:
    """A backlog, its shards' inboxes, and clients."""

    def __init__(self, shards: int, *, max_sessions: int = 1000, max_fds: int = MAX_FDS) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.scoreboard = Scoreboard.create(shards)
        self.pairs = [packet_pair() for _ in range(shards)]
        for index in range(shards):
            self.serve(index, max_sessions)
        self.backlog = Backlog([self.listener], max_fds=max_fds)
        self.distributor = Distributor(self.backlog, self.scoreboard, self.pairs, max_fds=max_fds)
        self.clients: list[socket.socket] = []

    def serve(self, index: int, max_sessions: int = 1000) -> None:
        row = self.scoreboard[index]
        row[Field.PID] = row[Field.READY] = row[Field.IDLE] = 1
        row[Field.MAX_SESSIONS] = max_sessions

    def connect(self, count: int) -> None:
        for _ in range(count):
            self.clients.append(socket.create_connection(self.listener.getsockname()))
        self.backlog.accept()

    def place(self, *, wanted: int = 1, later: float = 0.0) -> list[int]:
        """Place what waits; how many connections each inbox holds then."""
        now = time.monotonic() + later
        self.distributor.update(now)
        self.distributor.place(wanted, now)
        return [inbox.outstanding for inbox in self.distributor._inboxes]

    def take(self, index: int) -> list[Message]:
        """What a shard finds in its inbox; it counts it, as a shard does."""
        taken = []
        while (message := receive_message(self.pairs[index][0])) is not None:
            self.scoreboard[index].add(Field.CONNECTIONS, message.head.get("placed", 0))
            taken.append(message)
            close_all(message.fds)
        return taken

    def stop(self, text: str) -> None:
        self.distributor.take_back_all()
        self.backlog.refuse_all(text)

    def close(self) -> None:
        self.stop("over")
        close_all(each.fd for each in self.backlog.waiting)
        for end in [*self.clients, self.listener, *(end for pair in self.pairs for end in pair)]:
            end.close()
        os.close(self.scoreboard.fd)


MakeHouse = Callable[..., House]


@pytest.fixture
def house() -> Iterator[MakeHouse]:
    with ExitStack() as stack:

        def make(shards: int, **config: int) -> House:
            made = House(shards, **config)
            stack.callback(made.close)
            return made

        yield make


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """This process may have no more meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answer(client: socket.socket) -> bytes:
    client.settimeout(10)
    return client.recv(4096)


def test_shards_get_equal_parts_and_no_more_than_a_window(
    house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributor, "SHARE_IN_MESSAGE", 0)  # messages as where no crowd waits
    made = house(2)
    made.connect(2 * WINDOW + 50)
    assert made.place() == [WINDOW, WINDOW]
    assert len(made.backlog.waiting) == 50
    made.take(0)
    assert made.place() == [50, WINDOW]


def test_a_connection_goes_to_the_shard_with_the_fewest_sessions(house: MakeHouse) -> None:
    made = house(3)
    for index, sessions in enumerate((7, 2, 5)):
        made.scoreboard[index][Field.SESSIONS] = sessions
    made.connect(4)
    assert made.place() == [0, 4, 0] or made.place() == [0, 3, 1]
    assert sum(len(message.fds) for message in made.take(1)) >= 3


def test_a_full_shard_gets_one_only_when_all_are_full(house: MakeHouse) -> None:
    made = house(2, max_sessions=4)
    made.scoreboard[0][Field.SESSIONS] = 4
    made.scoreboard[1][Field.SESSIONS] = 3
    made.connect(1)
    assert made.place() == [0, 1]
    made.take(1)
    made.scoreboard[1][Field.SESSIONS] = 9
    made.connect(1)
    assert made.place() == [1, 0]


def test_the_oldest_go_first_and_keep_their_heads_when_taken_back(house: MakeHouse) -> None:
    made = house(1)
    made.connect(3)
    made.connect(2)
    made.place()
    ages = [age for message in made.take(0) for age in message.head["since"]]
    assert len(ages) == 5
    assert ages == sorted(ages)
    assert ages[0] < ages[-1] <= now_microseconds()
    # Another shard had handed it over, having read its head.
    made = house(1)
    made.connect(2)
    made.place()
    first = made.pairs[0][1]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = Unanswered(1, theirs.fileno(), b"GET /ws", accepted="lines")
        send_message(first, connection_message([asked]))
        made.distributor.shard_exited(0)
    made.place()
    seen = [(len(each.fds), each.body, each.head["accepted"]) for each in made.take(0)]
    assert sorted(seen) == [(1, b"GET /ws", "lines"), (2, b"", None)]


def test_a_starting_shards_share_waits_and_crowds_are_passed_at_once(house: MakeHouse) -> None:
    made = house(2)
    made.scoreboard[1][Field.READY] = 0
    made.connect(10)
    assert made.place(wanted=2) == [5, 0]
    made.scoreboard[1][Field.READY] = 1
    assert made.place(wanted=2) == [5, 5]
    made = house(2)
    made.connect(8 * MIN_IN_MESSAGE)
    assert made.place() == [4 * MIN_IN_MESSAGE, 4 * MIN_IN_MESSAGE]
    assert {len(message.fds) for message in made.take(0)} == {2 * MIN_IN_MESSAGE}
    made = house(1)
    made.connect(2)
    assert not made.backlog.is_crowd_arriving
    for _ in range(CROWD + 1):
        made.clients.append(socket.create_connection(made.listener.getsockname()))
    made.backlog.accept()
    assert made.backlog.is_crowd_arriving


def test_a_connection_beyond_the_bound_is_answered_503_at_once(house: MakeHouse) -> None:
    """Also where it has sent a request already, which is not read."""
    most = 40
    made = house(1, max_fds=2 * SPARE_FDS + most)
    made.connect(most + 5)
    assert len(made.backlog.waiting) == most
    late = socket.create_connection(made.listener.getsockname())
    late.sendall(b"GET /ws HTTP/1.1\r\nhost: x\r\n\r\n")
    made.clients.append(late)
    made.backlog.accept()
    for client in made.clients[most:]:
        said = answer(client)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in said


def test_a_shard_is_passed_no_more_connections_than_it_has_descriptors(house: MakeHouse) -> None:
    made = house(2, max_fds=2 * SPARE_FDS)
    made.scoreboard[0][Field.OPEN] = SPARE_FDS
    made.backlog._max_waiting = 10
    made.connect(3)
    assert made.place() == [0, 3]


def test_without_descriptors_connections_stay_in_the_queue_for_a_while(
    house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = house(1)
    client = socket.create_connection(made.listener.getsockname())
    made.clients.append(client)
    monkeypatch.setattr(acceptor, "FULL_SECONDS", 0.01)
    with descriptors(3):
        made.backlog.accept()
    assert len(made.backlog.waiting) == 0
    while not made.backlog.is_open:
        time.sleep(0.001)
    made.backlog.accept()
    assert len(made.backlog.waiting) == 1


def test_connections_are_lost_not_the_host_when_descriptors_are_short(house: MakeHouse) -> None:
    """What cannot be received is closed by the kernel."""
    made = house(1)
    made.connect(4)
    made.place()
    spare = os.dup(0)
    os.close(spare)
    with descriptors(spare + 2):
        made.distributor.shard_exited(0)
    assert len(made.backlog.waiting) < 4
