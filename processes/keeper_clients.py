# SPDX-License-Identifier: Apache-2.0
"""One client of a keeper: what it has half said, and what it is owed. Never blocks.

A status is whole in itself, so a client that reads slowly is owed the newest one only, made when
it can be sent. Replies are queued, up to a bound. Light: a keeper imports it.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Callable

MAX_LINE_BYTES = 64 * 1024
MAX_REPLIES = 64  # unread ones; who asks on without reading is dropped


class ClientGone(Exception):
    """The client left, or broke the rules; drop it."""


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket, status_line: Callable[[], bytes]) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._status_line = status_line
        self._inbox = b""
        self._outbox: list[tuple[bytes, int | None]] = []  # a line (or its rest), a descriptor
        self._status_is_due = False

    @property
    def owes(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._outbox) or self._status_is_due

    def owe_status(self) -> None:
        """The status has changed since it was sent last."""
        self._status_is_due = True

    def owe(self, line: bytes, fd: int | None = None) -> None:
        """Queue a reply, with a descriptor to hand over.

        Raises:
            ClientGone: when too many have not been read.
        """
        if len(self._outbox) >= MAX_REPLIES:
            raise ClientGone("it does not read its replies")
        self._outbox.append((line, fd))

    def read_lines(self) -> list[bytes]:
        """The lines that have come in whole.

        Raises:
            ClientGone: at the end of the connection, or when a line has no end.
        """
        try:
            data = self.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise ClientGone(str(exc)) from exc
        if not data:
            raise ClientGone("it left")
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        if len(self._inbox) > MAX_LINE_BYTES:
            raise ClientGone("its line has no end")
        return lines

    def send(self) -> None:
        """Send what the socket takes now.

        Raises:
            ClientGone: when it has left.
        """
        while self.owes:
            if not self._outbox:
                self._outbox.append((self._status_line(), None))
                self._status_is_due = False
            line, fd = self._outbox[0]
            try:
                sent = self.connection.sendmsg([line], _rights(fd))
            except BlockingIOError:
                return
            except OSError as exc:
                raise ClientGone(str(exc)) from exc
            if sent == len(line):
                del self._outbox[0]
            else:
                self._outbox[0] = line[sent:], None


def _rights(fd: int | None) -> list[tuple[int, int, array.array[int]]]:
    if fd is None:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
