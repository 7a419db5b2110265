# SPDX-License-Identifier: Apache-2.0
"""Messages with descriptors between the processes of one replica, and how connections travel.

    supervisor ◀──link i──▶ shard i    a SEQPACKET pair each: what begins, ends, fails
    supervisor ──inbox b──▶ shard b    a SEQPACKET pair each: new connections; every
    shard a ──inbox b──▶ shard b       shard has all writing ends, and the supervisor both ends, so
                                       that no connection is lost with a shard

A message is one packet (`system/process/descriptors.py`). A connection is handed over unanswered,
as its descriptor and the bytes read so far. Bytes that do not fit into a packet (the beginning of a
large body) are in a file; the message's last descriptor is of this file.

    the receiver is slow    `MessageChannel` keeps what does not fit and sends it when it does
    the receiver exits      a link ends (EPIPE); the supervisor takes back what is in an inbox
    the sender exits        its messages arrive; the kernel holds the descriptors

`PeerReplicas`: passes connections between the replicas of one address.

All replicas of an environment accept from the same sockets, so a connection for a session may be
accepted by a replica that does not have it. A session's id names its replica
(`shard/connections.py`), and each replica has a *control socket* in a private folder, which
is found by the replica's number. When a connection has waited for room at a replica as long as it
may, it is passed to the other replicas, one after another, before it is refused:

    shard of replica a ──descriptor, and the bytes read──▶ control socket of b ──▶ backlog of b
    scale ──its quota of sessions──▶ control socket of b

    b has exited or is starting    nothing listens there: its sessions are unknown
    b exits before it has read     the connection is reset
    b is slow                      a socket holds few messages (`net.unix.max_dgram_qlen`): a tries
                                   again until there is room
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...schema.protocol import door_path
from ...system.process import descriptors

MAX_CARRIED_BYTES = descriptors.MAX_PACKET_BYTES - 8192  # with a connection, in the message itself


class MessageChannel:
    """One end of a socket pair on an event loop: sends whole messages in order, does not block.

    It owns the descriptors of its messages, and closes them once they are sent.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        on_message: Callable[[descriptors.Message], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: deque[descriptors.Message] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._is_writing = False
        if on_message is not None:
            self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: descriptors.Message) -> None:
        """Send a message now, or as soon as there is room."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    @property
    def is_full(self) -> bool:
        """Return whether the receiver has no room, so that new messages wait here."""
        return bool(self._unsent)

    def close(self) -> None:
        """Stop reading and sending; the socket stays open."""
        if self._closed:
            return
        self._closed = True
        if self._on_message is not None:
            self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())

    def _flush(self) -> None:
        while self._unsent:
            try:
                if not descriptors.send_message(self._end, self._unsent[0]):
                    if not self._is_writing and not self._closed:
                        self._is_writing = True
                        self._loop.add_writer(self._end.fileno(), self._flush)
                    return
            except OSError:  # reading reports it
                pass
            descriptors.close_all(self._unsent.popleft().fds)
        if self._is_writing and not self._closed:
            self._is_writing = False
            self._loop.remove_writer(self._end.fileno())

    def _read(self) -> None:
        assert self._on_message is not None
        # One at a time, so that the loop has its turn; the selector calls again if there are more.
        try:
            if not self._closed and (message := descriptors.receive_message(self._end)) is not None:
                self._on_message(message)
        except EOFError:
            self.close()
            self._on_end()


class Unanswered(NamedTuple):
    """A connection on its way to the process that will answer it."""

    since: int  # when it was accepted, on the scoreboard's clock
    fd: int
    data: bytes = b""  # read from it so far
    first_full: int | None = None  # the first replica that had no room for it
    accepted: str | None = None  # by the project's middleware, with these headers


def connection_message(connections: Sequence[Unanswered], **head: Any) -> descriptors.Message:
    """Make a message of connections; one that was read from goes alone. Raises `OSError`."""
    first, fds = connections[0], tuple(each.fd for each in connections)
    head["since"] = [each.since for each in connections]
    head |= {"first_full": first.first_full, "accepted": first.accepted}
    if len(first.data) <= MAX_CARRIED_BYTES:
        return descriptors.Message(head, first.data, fds)
    with tempfile.TemporaryFile() as file:
        file.write(first.data)
        file.flush()
        return descriptors.Message({**head, "in_file": True}, b"", (*fds, os.dup(file.fileno())))


def connections_in(message: descriptors.Message) -> list[Unanswered]:
    """Return the connections in a message; a file with the bytes read from one is closed."""
    head, data = message.head, message.body
    if "in_file" in head:
        with open(message.fds[-1], "rb") as file:
            file.seek(0)
            data = file.read()
    pairs = zip(head["since"], message.fds, strict=False)
    return [Unanswered(*pair, data, head["first_full"], head["accepted"]) for pair in pairs]


def duplicate(transport: asyncio.BaseTransport) -> int | None:
    """Duplicate the descriptor of a transport's socket; None when it has none."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return None
    try:
        return os.dup(connection.fileno())
    except OSError:
        return None


RETRY_SECONDS = 0.005  # until a message that did not fit is sent again


@dataclass(eq=False, slots=True)
class PeerReplicas:
    """The control sockets of the replicas at one address; a server without a launch has none."""

    _prefix: str
    own: int

    def open(self) -> socket.socket | None:
        """Open this replica's socket, or return None if it needs none. Raises `OSError`."""
        if not self._prefix:
            return None
        path = Path(door_path(self._prefix, self.own))
        path.unlink(missing_ok=True)  # of a server that was killed
        control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        control.bind(os.fspath(path))
        path.chmod(0o600)
        control.setblocking(False)
        return control

    def has(self, replica: int) -> bool:
        """Return whether another replica accepts connections that are passed to it."""
        end = self._connect(replica) if self._prefix and replica != self.own else None
        if end is not None:
            end.close()
        return end is not None

    def are_several(self) -> bool:
        """Return whether other replicas listen, or listened recently, at this address."""
        return len(list(itertools.islice(self._numbers(), 2))) > 1

    def next_with_room(self, first_full: int) -> int | None:
        """Return the replica that may have room when this one has none; None: all were asked.

        Replicas are asked in the order of their numbers, from `first_full` on, and after the
        highest number from the lowest one on.
        """

        def turn(number: int) -> tuple[bool, int]:
            return number < first_full, number

        later = [number for number in self._numbers() if turn(number) > turn(self.own)]
        return next(filter(self.has, sorted(later, key=turn)), None)

    def _numbers(self) -> Iterator[int]:
        folder, _, name = self._prefix.rpartition("/")
        for found in os.listdir(folder):  # noqa: PTH208  no `Path` for each
            if found.startswith(name) and found.endswith(".door"):
                yield int(found[len(name) :].removesuffix(".door"))

    def send(self, replica: int, message: descriptors.Message) -> None:
        """Send a message to another replica, and close its descriptors. Within a running loop."""
        if (end := self._connect(replica)) is not None:
            with end, contextlib.suppress(OSError):  # the replica may have exited meanwhile
                if not descriptors.send_message(end, message):
                    loop = asyncio.get_running_loop()
                    loop.call_later(RETRY_SECONDS, self.send, replica, message)
                    return
        descriptors.close_all(message.fds)

    def _connect(self, replica: int) -> socket.socket | None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        end.setblocking(False)
        try:
            end.connect(door_path(self._prefix, replica))
        except OSError:
            end.close()
            return None
        return end
