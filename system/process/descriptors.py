# SPDX-License-Identifier: Apache-2.0
"""Messages with descriptors, over Unix sockets between processes of one machine.

A message is one packet: a line of JSON, then raw bytes, with descriptors (SCM_RIGHTS). On a stream
of lines, `rights`, `space_for` and `descriptors_of` transfer the descriptors. Light: a shim imports
it, hence no dataclasses.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..text.json_lines import Json, decode_line, encode_line
from ..text.units import MB

MAX_FDS = 200  # in one message; the kernel's limit is 253
MAX_PACKET_BYTES = 128 * 1024
_INT_BYTES = array.array("i").itemsize
_SEND_BUFFER_BYTES = MB


class Message(NamedTuple):
    """A message from one process to another."""

    head: Json
    body: bytes = b""
    fds: tuple[int, ...] = ()


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected, non-blocking ends that preserve packets."""
    kind = socket.SOCK_SEQPACKET if hasattr(socket, "MSG_CMSG_CLOEXEC") else socket.SOCK_DGRAM
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return pair


def send_message(end: socket.socket, message: Message) -> bool:
    """Send one message; the caller still has to close its descriptors.

    Returns False when it does not fit now. Raises `OSError`: the other side has ended.
    """
    data = encode_line(message.head) + message.body
    try:
        end.sendmsg([data], rights(message.fds))
    except (BlockingIOError, InterruptedError):
        return False
    except OSError as exc:
        if exc.errno in _NOT_NOW:
            return False
        raise
    return True


def receive_message(end: socket.socket, *, most_fds: int = MAX_FDS) -> Message | None:
    """Receive the next message; None if there is none now.

    The caller has to close its descriptors, which programs started later do not inherit. Raises
    `EOFError`: the other side has ended; `ValueError`: what has arrived is no message.
    """
    receive = partial(end.recvmsg, MAX_PACKET_BYTES, space_for(most_fds), _CLOEXEC)
    try:
        try:
            data, ancillary, _, _ = receive()
        except ConnectionResetError:
            # The other side has ended, and left something unread: Linux reports this once, and
            # before the messages that it had sent.
            data, ancillary, _, _ = receive()
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as exc:
        raise EOFError from exc
    fds = tuple(descriptors_of(ancillary))
    if not data:
        raise EOFError
    line, _, body = data.partition(b"\n")
    try:
        return Message(decode_line(line), body, fds)
    except ValueError:
        close_all(fds)
        raise


def rights(fds: Iterable[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return the ancillary data that `sendmsg` takes to send descriptors along."""
    sent = array.array("i", fds)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)] if sent else []


def space_for(most_fds: int) -> int:
    """Return the bytes that `recvmsg` needs for `most_fds` descriptors."""
    return socket.CMSG_SPACE(most_fds * _INT_BYTES)


def descriptors_of(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in the ancillary data that `recvmsg` returned."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return found.tolist()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; ignores those that are closed already."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# Buffers of datagrams, and too many descriptors on their way: both pass.
_NOT_NOW = (errno.ENOBUFS, errno.ETOOMANYREFS)
