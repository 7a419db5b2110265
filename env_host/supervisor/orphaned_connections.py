# SPDX-License-Identifier: Apache-2.0
"""Connections that a child had accepted and not answered when it died: what becomes of each.

    the kernel's count ──▶ `traffic_of` ──▶ `fate_of` ──▶ goes on in the shard that `heir_of` names
    what the child had told of it ────────────┘      ├──▶ is told (`last_words`)
                                                     └──▶ ends

A child tells of a connection when it has accepted it, and of what it read when it makes it wait. It
may have read more since, or have answered; the kernel knows. Nothing here is done, only decided.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from enum import Enum, auto
from typing import NamedTuple

from ..ipc.scoreboard import Board

# In `struct tcp_info` of linux/tcp.h: how large it is up to what is looked at, and where that is.
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_INFO_BYTES, _RECEIVED, _SENT = 208, 128, 200


class Unanswered(NamedTuple):
    """The host's copy of such a connection."""

    fd: int
    since: int  # microseconds of the board's clock: when it began to want something
    body: bytes = b""  # what was read of it, when it was told that it waits


class Traffic(NamedTuple):
    """What had happened on a connection."""

    sent_bytes: int
    read_bytes: int


class Fate(Enum):
    """What becomes of a connection."""

    GOES_ON = auto()  # whoever takes it knows no difference
    IS_TOLD = auto()  # something of it was read that is lost, but nothing was answered
    ENDS = auto()  # how far it was answered, only the dead knew


def traffic_of(fd: int) -> Traffic | None:
    """By the kernel's own count; None where it does not count (all but TCP on Linux 4.19)."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
            sent, received = (struct.unpack_from("Q", info, at)[0] for at in (_SENT, _RECEIVED))
            unread = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    except (OSError, struct.error):
        return None
    return Traffic(sent, max(0, received - unread))


def fate_of(traffic: Traffic | None, known_bytes: int) -> Fate:
    """`known_bytes`: how many of those that were read we have.

    Where nothing is counted, what is known to wait goes on: it was not answered, save in the last
    turn of the loop.
    """
    if traffic is None:
        return Fate.GOES_ON if known_bytes else Fate.ENDS
    if traffic.sent_bytes:
        return Fate.ENDS
    return Fate.GOES_ON if traffic.read_bytes <= known_bytes else Fate.IS_TOLD


def heir_of(board: Board, index: int, now: int) -> int:
    """Which shard takes over from one that died: that with the most room of those that turn; where
    no other does, its successor, or the first."""
    turning = (slot for slot in board.others(index) if slot.is_turning(now))
    other = max(turning, key=lambda slot: slot.room, default=None)
    if other is not None:
        return other.index
    return index if index < board.shards else 0
