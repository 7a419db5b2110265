# SPDX-License-Identifier: Apache-2.0
"""The clients of a shim: what each has half said, and what it is owed. Nobody blocks.

A status is whole in itself, so a client that reads slowly is owed the newest one only, made when
it can be sent. Replies are queued, up to a bound. Light: a shim imports it.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ..system.descriptors import rights
from ..system.json_lines import LineBuffer

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
        self._inbox = LineBuffer(MAX_LINE_BYTES)
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
        lines = self._inbox.feed(data)
        if self._inbox.has_overflowed:
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
                sent = self.connection.sendmsg([line], rights(() if fd is None else (fd,)))
            except BlockingIOError:
                return
            except OSError as exc:
                raise ClientGone(str(exc)) from exc
            if sent == len(line):
                del self._outbox[0]
            else:
                self._outbox[0] = line[sent:], None


class Clients:
    """Everybody who is connected, and the socket on which they connect, watched by `selector`.

    `answer` is called with a client and each line that it sent. It may `tell`, and so drop whoever
    is just being read from.
    """

    def __init__(
        self,
        control: socket.socket,
        selector: selectors.BaseSelector,
        status_line: Callable[[], bytes],
        answer: Callable[[Client, bytes], None],
    ) -> None:
        self._control = control
        self._selector = selector
        self._status_line = status_line
        self._answer = answer
        self._connected: set[Client] = set()
        control.setblocking(False)
        selector.register(control, selectors.EVENT_READ, self._on_connect)

    @property
    def are_owed(self) -> bool:
        """Whether somebody has not been sent everything."""
        return any(client.owes for client in self._connected)

    def tell(self) -> None:
        """The status has changed."""
        for client in list(self._connected):
            client.owe_status()
            self._flush(client)

    def admit_no_more(self) -> None:
        """Who connects from now on hears nothing, until we are gone."""
        self._selector.unregister(self._control)

    def drop_all(self) -> None:
        """Close every connection."""
        for client in list(self._connected):
            self._drop(client)

    def _on_connect(self) -> None:
        try:
            connection, _ = self._control.accept()
        except OSError:
            return  # it left before it was let in
        client = Client(connection, self._status_line)
        self._connected.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(client))
        client.owe_status()
        self._flush(client)

    def _serve(self, client: Client) -> None:
        if client not in self._connected:
            return  # dropped earlier in this round
        try:
            for line in client.read_lines():
                self._answer(client, line)
        except ClientGone:
            self._drop(client)
            return
        self._flush(client)

    def _flush(self, client: Client) -> None:
        if client not in self._connected:
            return
        try:
            client.send()
        except ClientGone:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.owes else 0)
        key = self._selector.get_key(client.connection)
        if key.events != events:
            self._selector.modify(client.connection, events, key.data)

    def _drop(self, client: Client) -> None:
        if client in self._connected:
            self._connected.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()
