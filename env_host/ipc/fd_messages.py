# SPDX-License-Identifier: Apache-2.0
"""Messages with descriptors between the processes of one replica, and how connections travel.

    host ◀──link i──▶ shard i         one SEQPACKET pair each: what begins, ends, fails
    shard a ──inbox b──▶ shard b      one SEQPACKET pair each, every shard has all writing ends;
                                      they outlive the shard, so that nothing sent is lost with it

A message is one packet: a line of JSON, then raw bytes; descriptors go beside it (SCM_RIGHTS). A
connection is handed over before anything of it was answered: its descriptor and the bytes that
were read of it are all there is to it.

    the receiver is slow    `Post` keeps what does not fit and sends it when it does
    the receiver is dead    a link ends (EPIPE); an inbox waits for the successor
    the sender dies         what it sent has been sent; the kernel holds the descriptors
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_FDS = 200  # in one message; the kernel's limit is 253
MAX_PACKET_BYTES = 128 * 1024
_FDS_BYTES = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_SEND_BUFFER_BYTES = 1024 * 1024

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """What one process tells another."""

    head: Json
    body: bytes = b""
    fds: tuple[int, ...] = field(default=())


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep packets apart; neither blocks."""
    kind = socket.SOCK_SEQPACKET if hasattr(socket, "MSG_CMSG_CLOEXEC") else socket.SOCK_DGRAM
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return pair


def send(end: socket.socket, message: Message) -> bool:
    """Send one message; False when it does not fit now.

    Raises:
        OSError: nobody is there any more.
    """
    data = _to_json(message.head).encode() + b"\n" + message.body
    rights = []
    if message.fds:
        fds = array.array("i", message.fds)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
    try:
        end.sendmsg([data], rights)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError as exc:
        if exc.errno in _NOT_NOW:
            return False
        raise
    return True


def receive(end: socket.socket) -> Message | None:
    """The next message; None when there is none now. The descriptors are the caller's to close.

    Raises:
        EOFError: the other side has ended.
    """
    try:
        data, ancillary, _, _ = end.recvmsg(MAX_PACKET_BYTES, _FDS_BYTES, _CLOEXEC)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as exc:
        raise EOFError from exc
    fds = tuple(_fds_of(ancillary))
    if not data:
        raise EOFError
    line, _, body = data.partition(b"\n")
    return Message(_from_json(line.decode()), body, fds)


def _fds_of(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(data) // struct.calcsize("i")
            found += struct.unpack(f"{count}i", data[: count * struct.calcsize("i")])
    return found


class Post:
    """One end of a pair on an event loop: sends in order, whole, without waiting.

    It owns the descriptors it is given to send, and closes them once they have gone.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        on_message: Callable[[Message], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: deque[Message] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._is_writing = False
        if on_message is not None:
            self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: Message) -> None:
        """Send it now, or as soon as there is room."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        """Neither read nor send any more; the socket stays its owner's."""
        if self._closed:
            return
        self._closed = True
        if self._on_message is not None:
            self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())

    def _flush(self) -> None:
        while self._unsent:
            try:
                if not send(self._end, self._unsent[0]):
                    self._watch_for_room()
                    return
            except OSError:  # the reader's end tells of it
                pass
            close_all(self._unsent.popleft().fds)
        if self._is_writing and not self._closed:
            self._is_writing = False
            self._loop.remove_writer(self._end.fileno())

    def _watch_for_room(self) -> None:
        if not self._is_writing and not self._closed:
            self._is_writing = True
            self._loop.add_writer(self._end.fileno(), self._flush)

    def _read(self) -> None:
        assert self._on_message is not None
        try:
            while not self._closed and (message := receive(self._end)) is not None:
                self._on_message(message)
        except EOFError:
            self.close()
            self._on_end()


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors; one that is closed already is no matter."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# Buffers of datagrams, and too many descriptors on their way: both pass.
_NOT_NOW = (errno.ENOBUFS, errno.ETOOMANYREFS)
